"use strict";
// Theme: the system's, until the button says otherwise.
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
const wanted = new URLSearchParams(location.search).get("theme");
const setTheme = (name) => { root.dataset.theme = name; drawLanes(); };
const tip = document.getElementById("tip");

function showTip(text, x, y) {
  tip.textContent = text;
  tip.style.opacity = text ? 0.96 : 0;
  if (!text) return;
  tip.style.left = Math.max(6, Math.min(x + 14, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = Math.max(6, Math.min(y + 16, innerHeight - tip.offsetHeight - 8)) + "px";
}
document.addEventListener("pointermove", (event) => {
  if (event.target.classList.contains("lanes")) return;
  const holder = event.target.closest("[data-tip]");
  showTip(holder ? holder.dataset.tip : "", event.clientX, event.clientY);
});

// Timeline: one canvas a replica. Bars are [start, end, lane, version, length, reward], times in centiseconds.
const timeline = JSON.parse(document.getElementById("timeline").textContent);
const whole = [0, Math.max(1, timeline.end)];
let view = [...whole];
let drag = null;

function color(version) {
  const [low, high] = timeline.versions;
  const share = high > low ? (version - low) / (high - low) : 0.5;
  const light = (root.dataset.theme === "dark" ? 56 : 50) + (version % 2 ? 9 : -4);
  return `hsl(${225 - 205 * share} 68% ${light}%)`;
}
function laneX(canvas, time) { return (time - view[0]) / (view[1] - view[0]) * canvas.width; }
function timeAt(canvas, event) {
  const box = canvas.getBoundingClientRect();
  return view[0] + (event.clientX - box.left) / box.width * (view[1] - view[0]);
}
function drawLanes() {
  const scale = devicePixelRatio || 1;
  for (const canvas of document.querySelectorAll(".lanes")) {
    const replica = timeline.replicas[canvas.dataset.replica];
    canvas.width = Math.max(1, Math.round(canvas.clientWidth * scale));
    canvas.height = Math.round(canvas.clientHeight * scale);
    const pen = canvas.getContext("2d");
    pen.fillStyle = getComputedStyle(root).getPropertyValue("--chip");
    pen.fillRect(0, 0, canvas.width, canvas.height);
    const row = canvas.height / Math.max(1, replica.lanes);
    for (const [start, end, lane, version] of replica.bars) {
      if (end < view[0] || start > view[1]) continue;
      const x = laneX(canvas, start);
      pen.fillStyle = color(version);
      pen.fillRect(x, lane * row, Math.max(0.8, laneX(canvas, end) - x - 0.4), Math.max(0.7, row - (row > 2 ? 0.6 : 0)));
    }
    if (drag && drag.canvas === canvas) {
      pen.fillStyle = "rgba(128,140,160,.35)";
      pen.fillRect(laneX(canvas, drag.from), 0, laneX(canvas, drag.to) - laneX(canvas, drag.from), canvas.height);
    }
  }
  for (const ruler of document.querySelectorAll(".ruler")) {
    ruler.textContent = `${(view[0] / 100).toFixed(1)} s to ${(view[1] / 100).toFixed(1)} s`;
  }
}
function laneTip(canvas, event) {
  const replica = timeline.replicas[canvas.dataset.replica];
  const box = canvas.getBoundingClientRect();
  const time = timeAt(canvas, event);
  const lane = Math.floor((event.clientY - box.top) / box.height * replica.lanes);
  const bar = replica.bars.find((b) => b[2] === lane && b[0] <= time && time <= b[1]);
  if (!bar) return showTip("", 0, 0);
  const reward = bar[5] === null ? "not graded" : `reward ${bar[5]}`;
  showTip(`version ${bar[3]}, ${bar[4]} tokens, ${reward}\n${(bar[0] / 100).toFixed(2)} s to ${(bar[1] / 100).toFixed(2)} s`,
    event.clientX, event.clientY);
}
for (const canvas of document.querySelectorAll(".lanes")) {
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    drag = { canvas, from: timeAt(canvas, event), to: timeAt(canvas, event) };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return laneTip(canvas, event);
    drag.to = timeAt(canvas, event);
    drawLanes();
  });
  canvas.addEventListener("pointerup", () => {
    const [a, b] = [Math.min(drag.from, drag.to), Math.max(drag.from, drag.to)];
    if (b - a > (view[1] - view[0]) / 200) view = [Math.max(whole[0], a), Math.min(whole[1], b)];
    drag = null;
    drawLanes();
  });
  canvas.addEventListener("pointerleave", () => showTip("", 0, 0));
}
for (const button of document.querySelectorAll("[data-act=reset]")) {
  button.addEventListener("click", () => { view = [...whole]; drawLanes(); });
}
document.querySelector("[data-act=theme]").addEventListener("click", () => {
  setTheme(root.dataset.theme === "dark" ? "light" : "dark");
});
dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
addEventListener("resize", drawLanes);
setTheme(wanted === "dark" || wanted === "light" ? wanted : dark.matches ? "dark" : "light");
