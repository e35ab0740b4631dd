"""The status page: one self-contained HTML file that asks /v1/status once a second."""

from __future__ import annotations

import json

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Laminar</title>
<style>
 :root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 20%, transparent); --accent: #2f7dd1 }
 body { font: 14px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
 h1 { font-size: 1.3rem; margin: 0 } small, th { opacity: .7; font-weight: normal }
 .bar { height: .5rem; background: var(--line); border-radius: .25rem; margin: .8rem 0 }
 .bar i { display: block; height: 100%; background: var(--accent); border-radius: inherit; width: 0 }
 .facts { display: flex; flex-wrap: wrap; gap: .5rem 2rem } .facts b { display: block; font-size: 1.2rem }
 table { border-collapse: collapse; width: 100%; margin-top: 1rem }
 td, th { text-align: left; padding: .2rem .6rem .2rem 0; border-bottom: 1px solid var(--line) }
 svg { width: 100%; height: 8rem; margin-top: 1rem } polyline { fill: none; stroke: var(--accent); stroke-width: 1.5 }
 .bad { color: #c43 } ul { padding-left: 1rem }
</style></head><body>
<h1 id="job">Laminar</h1><small id="phase" role="status"></small>
<div class="bar"><i id="bar"></i></div><div class="facts" id="facts"></div>
<svg id="curve" viewBox="0 0 100 30" preserveAspectRatio="none" role="img" aria-label="Reward by step">
<polyline vector-effect="non-scaling-stroke"/></svg>
<table><thead><tr><th>member<th>state<th>version<th>running<th>KV<th>heard</tr></thead>
<tbody id="members"></tbody></table>
<ul id="events"></ul>
<script>
const job = JOB_JSON, token = new URLSearchParams(location.search).get("token");
const headers = { authorization: "Bearer " + token, "laminar-job": job };
const byId = id => document.getElementById(id);
async function ask(path) {
  const answer = await fetch(path, { headers });
  if (!answer.ok) throw new Error(answer.status);
  return answer.json();
}
function row(cells, bad) {
  const tr = document.createElement("tr");
  for (const cell of cells) tr.insertCell().textContent = cell;
  if (bad) tr.className = "bad";
  return tr;
}
function fact(name, value) {
  const div = document.createElement("div"), b = document.createElement("b");
  b.textContent = value; div.append(b, name); return div;
}
const mean = h => { let n = 0, s = 0; for (const [v, c] of Object.entries(h.counts)) { n += c; s += v * c }
  return n ? (s / n).toFixed(2) : "-" };
function show(s) {
  document.title = `${s.job} ${s.committed_step}/${s.steps}`;
  byId("job").textContent = s.job;
  const conditions = Object.entries(s.conditions).map(([k, v]) => `${k}: ${v}`).join(" ");
  const e = s.evaluating, doing = e ? `evaluating version ${e.version}: ${e.num_done}/${e.num_samples}` : s.phase;
  byId("phase").textContent = [doing, s.reason, conditions].filter(Boolean).join(" - ");
  byId("bar").style.width = 100 * s.committed_step / s.steps + "%";
  const c = s.counts;
  byId("facts").replaceChildren(
    fact("step", `${s.committed_step} / ${s.steps}`),
    fact("reward", s.last_step ? s.last_step.reward_mean.toFixed(3) : "-"),
    fact("version", s.newest ? s.newest.version : "-"), fact("staleness, inherent", mean(s.inherent)),
    fact("consumed", mean(s.consumed)), fact("samples open", c.open), fact("moved", c.moved_samples),
    fact("chain epoch", s.epoch), fact("attempt", s.attempt));
  byId("members").replaceChildren(...s.members.map(m => {
    const l = s.loads[m.slot];
    return row([m.slot, m.suspect ? "suspect" : m.fenced ? "fenced" : m.state, m.version ?? "", l ? l.running : "",
      l && l.kv_capacity_tokens ? Math.round(100 * l.kv_used_tokens / l.kv_capacity_tokens) + "%" : "",
      m.silent_s.toFixed(1) + " s ago"], m.suspect || m.fenced) }));
  const r = s.reward_curve, top = Math.max(...r, 1e-9), low = Math.min(...r, 0);
  byId("curve").firstElementChild.setAttribute("points",
    r.map((v, i) => `${100 * i / Math.max(1, r.length - 1)},${29 - 28 * (v - low) / (top - low)}`).join(" "));
}
async function events(last) {
  const found = await ask(`/v1/events?after=${Math.max(0, last - 8)}&limit=8`);
  byId("events").replaceChildren(...found.reverse().map(e => {
    const li = document.createElement("li");
    li.textContent = new Date(1000 * e.wall_s).toLocaleTimeString() + " " + e.text; return li }));
}
async function refresh() {
  try { const s = await ask("/v1/status"); show(s); await events(s.last_event_seq) }
  catch (error) { byId("phase").textContent = "no answer (" + error.message + ")" }
  setTimeout(refresh, 1000);
}
refresh();
</script></body></html>
"""


def status_page(job_uid: str) -> str:
    """The page of one job; it takes the token from its own address."""
    return _PAGE.replace("JOB_JSON", json.dumps(job_uid).replace("<", "\\u003c"))
