"""What processes say to each other: messages, specs and encodings, checked at the boundary."""
