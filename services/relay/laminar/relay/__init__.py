"""The relay service: carries published weights from trainers to rollouts."""
