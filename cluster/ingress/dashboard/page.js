"use strict";
const PERIOD_MS = 1000, KEPT = 120;
const $ = (id) => document.getElementById(id);
const POLLS_APART = 5, WIDE = 320, HIGH = 96, LEFT = 30, BELOW = 80, NUM_BARS = 45;
const kept = {};
let pollsLeft = 0, numSlots = 90, past = null, shown = "";

function element(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "text") made.textContent = value; else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const percent = (x) => `${(100 * x).toFixed(x < 0.9995 && x > 0 ? 1 : 0)} %`;
const milli = (s) => s === null ? "–" : s >= 1 ? `${s.toFixed(s >= 10 ? 0 : 2)} s` : `${(1000 * s).toFixed(s < 0.01 ? 1 : 0)} ms`;
const seconds = (s) => s.toFixed(2);
const figure = (x) => Number.isInteger(x) || x >= 10 ? Math.round(x).toLocaleString("en") : x.toFixed(x >= 0.1 ? 1 : 2);
const amount = (x) => { let i = 0; while (x >= 1000 && i < 4) { x /= 1000; i++; } return `${figure(x)} ${["B", "kB", "MB", "GB", "TB"][i]}`; };
const bytes = (x) => `${amount(x)}/s`;

function bar(share, label, level) {
  const meter = element("meter", { min: 0, max: 1, value: share, "aria-label": label });
  return element("span", {}, meter, element("span", { text: percent(share), class: level }));
}

function table(id, caption, columns, rows) {
  const head = element("tr");
  for (const [name, numeric] of columns) head.append(element("th", { scope: "col", class: numeric === 1 ? "num" : "", text: name }));
  const body = element("tbody");
  for (const row of rows) {
    const line = element("tr");
    row.forEach((cell, i) => {
      const box = element("td", { class: columns[i][1] === 1 ? "num" : columns[i][1] ?? "", "data-label": columns[i][2] ?? columns[i][0] });
      box.append(cell);
      line.append(box);
    });
    body.append(line);
  }
  if (!rows.length) body.append(element("tr", {}, element("td", { colspan: columns.length, class: "soft", text: "nothing yet" })));
  const title = element("caption", { text: caption, hidden: "" });
  $(id).replaceChildren(title, element("thead", {}, head), body);
}

function spark(values) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${KEPT - 1} 10`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const top = Math.max(...values, 1e-9), from = KEPT - values.length;
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", values.map((v, i) => `${i ? "L" : "M"}${from + i} ${9.5 - 9 * v / top}`).join(""));
  svg.append(path);
  return svg;
}

function tile(name, value, text) {
  const values = (kept[name] ||= []);
  values.push(value);
  if (values.length > KEPT) values.shift();
  return element("div", {}, element("dt", { text: name }), element("dd", { text }), spark(values));
}

const sum = (list, of) => list.reduce((total, one) => total + of(one), 0);
const role = (i) => i.prefills && i.decodes ? "both" : i.prefills ? "prefill" : "decode";
const judged = (x, fair, fine) => x >= fine ? "good" : x >= fair ? "warn" : "bad";

function condition(i) {
  if (i.defect) return element("span", { class: "bad", text: `broken accounting: ${i.defect}` });
  return i.leaving ? element("span", { class: "warn", text: "draining" }) : element("span", { class: "good", text: "serving" });
}

function asleep(i) {
  return element("span", { class: "soft", text: `${i.state}, level ${i.level}, wakes in ${seconds(i.wake_s)}` });
}

function show(s) {
  $("model").textContent = shown = s.model;
  showModels(s.models ?? []);
  $("state").textContent = s.why_not ? `not accepting: ${s.why_not}` : "accepting requests";
  $("state").className = s.why_not ? "bad" : "good";
  const decoding = s.instances.filter((i) => i.decodes), offered = sum(s.classes, (c) => c.requests_per_s), good = sum(s.classes, (c) => c.goodput_per_s);
  $("tiles").replaceChildren(
    tile("Attainment", offered ? good / offered : 0, offered ? percent(good / offered) : "–"),
    tile("Goodput, requests/s", good, figure(good)),
    tile("Output, tokens/s", sum(s.classes, (c) => c.output_tokens_per_s), figure(sum(s.classes, (c) => c.output_tokens_per_s))),
    tile("Decoding", sum(decoding, (i) => i.num_running), figure(sum(decoding, (i) => i.num_running))),
    tile("Waiting for a place", s.num_queued, figure(s.num_queued)),
    tile("KV handed over", sum(s.links, (l) => l.bytes_per_s), bytes(sum(s.links, (l) => l.bytes_per_s))),
  );
  table("classes", "Service classes", [["class"], ["attainment"], ["requests/s", 1], ["TTFT p50", 1], ["p99", 1, "TTFT p99"], ["target", 1, "TTFT target"], ["TPOT p50", 1], ["p99", 1, "TPOT p99"], ["target", 1, "TPOT target"], ["output tokens/s", 1]],
    s.classes.map((c) => [c.name, bar(c.attainment, `attainment of ${c.name}`, judged(c.attainment, 0.9, 0.99)), figure(c.requests_per_s), milli(c.ttft_p50_s), milli(c.ttft_p99_s), milli(c.ttft_target_s), milli(c.tpot_p50_s), milli(c.tpot_p99_s), milli(c.tpot_target_s), figure(c.output_tokens_per_s)]));
  table("routes", "Routes", [["route"], ["attainment"], ["requests/s", 1], ["TTFT p50", 1], ["p99", 1, "TTFT p99"], ["output tokens/s", 1]],
    s.routes.map((r) => [r.name, bar(r.attainment, `attainment of ${r.name}`, judged(r.attainment, 0.9, 0.99)), figure(r.requests_per_s), milli(r.ttft_p50_s), milli(r.ttft_p99_s), figure(r.output_tokens_per_s)]));
  showInstances(s);
  showStarts(s.instances);
}

function facts(pairs) {
  return element("dl", {}, ...pairs.flatMap(([name, value]) => [element("dt", { text: name }), element("dd", { text: value })]));
}

function showInstances(s) {
  const boxes = s.instances.map((i) => {
    const used = i.num_blocks ? 1 - i.free_blocks / i.num_blocks : 0, w = i.work;
    const sent = s.links.filter((l) => l.source === i.address);
    return element("article", { "data-address": i.address },
      element("h3", { text: `${role(i)} ` }, condition(i)), element("p", { class: "soft", text: i.address }),
      element("p", {}, bar(used, `KV blocks in use at ${i.address}`, used > 0.95 ? "warn" : ""), " of its KV"),
      facts([["running", figure(i.num_running)], ["waiting", figure(i.num_waiting)], ["step", milli(i.step_s)], ["prompt tokens queued", figure(i.queued_tokens)],
        ["prefix hits", w.prefix_queried_tokens ? percent(w.prefix_hit_tokens / w.prefix_queried_tokens) : "–"], ["open grants, fences", `${figure(w.live_grants)}, ${figure(w.fences)}`]]),
      ...sent.map((l) => element("p", { text: `→ ${l.target}: ${bytes(l.bytes_per_s)} by ${l.transport}, ${figure(l.transfers_per_s)} hand-overs/s, exposed ${milli(l.exposed_p50_s)}` })));
  });
  const sleepers = s.sleepers.map((i) => element("article", { "data-address": i.address }, element("h3", { text: `${role(i)} ` }, asleep(i)), element("p", { class: "soft", text: i.address })));
  $("instances").replaceChildren(...boxes, ...sleepers);
}

function showModels(models) {
  $("all").hidden = !models.length;
  if (!models.length) return;
  table("models", "Models", [["model"], ["state"], ["instances", 1], ["running", 1], ["waiting for a place", 1]],
    models.map((m) => {
      const link = element("a", { href: `?model=${encodeURIComponent(m.model)}`, text: m.model });
      return [link, element("span", { class: m.why_not ? "bad" : "good", text: m.why_not || "serving" }), ...["num_instances", "num_running", "num_queued"].map((name) => name in m ? figure(m[name]) : "–")];
    }));
}

function showStarts(instances) {
  const timed = instances.filter((i) => i.start.phases.length), phases = [...new Set(timed.flatMap((i) => i.start.phases.map(([name]) => name)))];
  table("starts", "Starts", [["role"], ["address"], ["whole", 1], ...phases.map((name) => [name, 1]), ["weights", 1], ["read and packed", 1]],
    timed.map((i) => {
      const s = i.start, took = Object.fromEntries(s.phases), loading = (took.reading ?? 0) + (took.packing ?? 0);
      return [role(i), i.address, seconds(sum(s.phases, ([, x]) => x)), ...phases.map((name) => name in took ? seconds(took[name]) : "–"), amount(s.bytes_read), loading ? bytes(s.bytes_read / loading) : "–"];
    }));
}

function trouble(text) {
  $("trouble").hidden = !text;
  $("trouble").textContent = text;
  if (text) { $("state").textContent = "figures are old"; $("state").className = "bad"; }
}

function ask(path) {
  const key = sessionStorage.getItem("key");
  return fetch(path, { headers: key ? { Authorization: `Bearer ${key}` } : {}, signal: AbortSignal.timeout(5000) });
}

async function poll() {
  try {
    const answer = await ask("cluster" + location.search);
    $("ask").hidden = answer.status !== 401;
    if (!answer.ok) throw new Error(answer.status === 401 ? "this server asks for an API key" : `the server answers ${answer.status}`);
    show(await answer.json());
    trouble("");
    if (pollsLeft-- === 0) { pollsLeft = POLLS_APART; await showPast(); }
  } catch (error) {
    trouble(error instanceof TypeError || error.name === "TimeoutError" ? "the server does not answer" : error.message);
  }
  setTimeout(poll, PERIOD_MS);
}

function drawn(tag, options, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(options)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const clock = (s) => new Date(1000 * s).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
const moment = (s) => new Date(1000 * s).toLocaleTimeString();
const across = (i, count) => LEFT + (WIDE - LEFT) * (i + 0.5) / count;

function frame(title, top, begins_at, seconds, say, ...inside) {
  const marks = [0, 1 / 3, 2 / 3].map((share) => drawn("text", { x: LEFT + (WIDE - LEFT) * share, y: HIGH - 3 }, clock(begins_at + seconds * share)));
  const axis = drawn("path", { class: "axis", d: `M${LEFT} ${BELOW}H${WIDE}` });
  return element("figure", {}, element("figcaption", {}, ...title),
    drawn("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": title.map((t) => t.textContent ?? t).join(" ") }, drawn("text", { x: 0, y: 10 }, say(top)), axis, ...inside, ...marks));
}

function line(values, top, kind) {
  let d = "", begun = false;
  values.forEach((v, i) => {
    if (v === null) { begun = false; return; }
    d += `${begun ? "L" : "M"}${across(i, values.length).toFixed(1)} ${(BELOW - (BELOW - 4) * Math.min(1, v / top)).toFixed(1)}${begun ? "" : "h0.1"}`;
    begun = true;
  });
  return drawn("path", { class: kind, d });
}

function times(of, name, half, most, target) {
  const highest = Math.max(...half.map((v) => v ?? 0), ...most.map((v) => v ?? 0), 1e-3), near = target !== null && target < 4 * highest;
  const top = 1.1 * Math.max(highest, near ? target : 0), aim = near ? [line(half.map(() => target), top, "aim")] : [];
  const keys = [`${name}: `, element("span", { class: "key p50", text: "p50" }), " ", element("span", { class: "key p99", text: "p99" })];
  if (target !== null) keys.push(" ", element("span", { class: "key aim", text: `target ${milli(target)}` }));
  return frame(keys, top, of.begins_at, of.seconds, milli, ...aim, line(most, top, "p99"), line(half, top, "p50"));
}

function counts(of, c) {
  const wide = numSlots / NUM_BARS, columns = [...Array(NUM_BARS).keys()].map((i) => {
    const at = (list) => list.slice(-numSlots).slice(i * wide, (i + 1) * wide).reduce((a, b) => a + b, 0);
    const [ended, attained, failed] = [at(c.ended), at(c.attained), at(c.failed)];
    return [["good", attained], ["warn", ended - attained - failed], ["bad", failed]];
  });
  const top = Math.max(1, ...columns.map((parts) => sum(parts, ([, n]) => n))), bars = [];
  columns.forEach((parts, i) => {
    let below = BELOW;
    for (const [kind, n] of parts.filter(([, n]) => n)) {
      const high = (BELOW - 4) * n / top;
      bars.push(drawn("rect", { class: kind, x: across(i, NUM_BARS) - 2.6, width: 5.2, y: below -= high, height: high }));
    }
  });
  const keys = [`requests per ${of.seconds / NUM_BARS} s: `, element("span", { class: "key good", text: "in time" }), " ", element("span", { class: "key warn", text: "late" }), " ", element("span", { class: "key bad", text: "failed" })];
  return frame(keys, top, of.begins_at, of.seconds, figure, ...bars);
}

function showHistory() {
  for (const button of document.querySelectorAll("[data-slots]")) button.setAttribute("aria-pressed", String(Number(button.dataset.slots) === numSlots));
  if (!past || !past.classes.length) return;
  const of = { begins_at: past.begins_at + (past.classes[0].ended.length - numSlots) * past.slot_s, seconds: numSlots * past.slot_s };
  $("history").className = "";
  $("history").replaceChildren(...past.classes.map((c) => {
    const late = (name) => c[name].slice(-numSlots);
    return element("article", { "data-class": c.name }, element("h3", { text: c.name }), element("div", { class: "charts" }, counts(of, c),
      times(of, "TTFT", late("ttft_p50_s"), late("ttft_p99_s"), c.ttft_target_s), times(of, "TPOT", late("tpot_p50_s"), late("tpot_p99_s"), c.tpot_target_s)));
  }));
}

async function showPast() {
  const [history, requests] = await Promise.all(["history", "requests"].map((name) => ask(`cluster/${name}?model=${encodeURIComponent(shown)}`)));
  if (!history.ok || !requests.ok) return;
  past = await history.json();
  showHistory();
  const found = await requests.json();
  const opener = (r) => element("button", { type: "button", class: "id", "data-id": r.id, text: r.id });
  table("slowest", "Slowest requests", [["ended"], ["request"], ["class"], ["prompt", 1], ["output", 1], ["TTFT", 1], ["TPOT", 1], ["why", "why"]],
    found.slowest.slice(0, 10).map((r) => [moment(r.started_at + r.took_s), opener(r), element("span", { class: r.attained ? "good" : "bad", text: r.slo_class }), figure(r.prompt_tokens), figure(r.output_tokens), milli(r.ttft_s), milli(r.tpot_s), r.why]));
  table("failed", "Failed requests", [["ended"], ["request"], ["class"], ["after", 1], ["output", 1], ["why", "why"]],
    found.failed.slice(0, 10).map((r) => [moment(r.started_at + r.took_s), opener(r), r.slo_class, milli(r.took_s), figure(r.output_tokens), r.error]));
}

const PARTS = [["queue", "waits for a place"], ["prompt", "prompt"], ["kv", "its KV is awaited"], ["decode", "decoding"]];

function lane(a, whole) {
  const ends = [a.started_s, a.placed_s ?? a.ended_s, a.first_token_s ?? a.ended_s, a.decode_s ?? a.ended_s, a.ended_s];
  const box = element("div", { class: "lane" });
  PARTS.forEach(([kind, name], i) => {
    if (ends[i + 1] <= ends[i]) return;
    const part = element("span", { class: `part ${kind}`, title: `${name}: ${milli(ends[i + 1] - ends[i])}` });
    part.style.left = `${100 * ends[i] / whole}%`;
    part.style.width = `${100 * (ends[i + 1] - ends[i]) / whole}%`;
    box.append(part);
  });
  return box;
}

function timeline(r) {
  const whole = Math.max(r.took_s, 1e-6);
  const legend = element("p", { class: "legend" }, ...PARTS.map(([kind, name]) => element("span", {}, element("i", { class: kind }), name)));
  const rows = r.attempts.flatMap((a) => {
    const where = a.prefill ? `${a.prefill} → ${a.decode}` : a.decode || "nowhere";
    const said = [`attempt ${a.number + 1}: ${where}`, `longest gap ${milli(a.longest_gap_s)}`];
    if (a.transport) said.push(`${amount(a.num_bytes)} by ${a.transport}`, `prompt queued ${milli(a.prefill_queue_s)}`);
    if (a.lost) said.push(`${a.lost} was lost`);
    const phases = PARTS.map(([, name], i) => [name, [a.started_s, a.placed_s, a.first_token_s, a.decode_s, a.ended_s].slice(i, i + 2)]);
    const took = phases.filter(([, [from, to]]) => from !== null && to !== null).map(([name, [from, to]]) => `${name} ${milli(to - from)}`);
    return [element("p", { text: said.join(" · ") }), lane(a, whole), element("p", { class: "soft", text: took.join(" · ") })];
  });
  return element("div", {}, element("p", { class: r.error ? "bad" : r.attained ? "good" : "warn", text: `${r.error ? "failed" : r.attained ? "in time" : "late"}: ${r.why}` }),
    element("p", { class: "soft", text: `${moment(r.started_at)} · ${r.route} · class ${r.slo_class}${r.tenant ? ` · tenant ${r.tenant}` : ""} · ${figure(r.prompt_tokens)} + ${figure(r.output_tokens)} tokens · ${milli(r.took_s)} · TTFT ${milli(r.ttft_s)} · TPOT ${milli(r.tpot_s)}` }),
    legend, ...rows);
}

async function open(id) {
  const asked = new URLSearchParams(location.search);
  asked.set("id", id);
  const answer = await ask(`cluster/requests?${asked}`);
  const found = answer.ok ? (await answer.json()).requests : [];
  $("h-request").textContent = id;
  $("found").replaceChildren(...(found.length ? found.map(timeline) : [element("p", { text: "This ingress has ended no such request lately. It may still run, or belong to another ingress." })]));
  if (!$("request").open) $("request").showModal();
}

document.addEventListener("click", (event) => {
  const { id, slots } = event.target.dataset ?? {};
  if (id) location.hash = `request=${encodeURIComponent(id)}`;
  if (slots) { numSlots = Number(slots); showHistory(); }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || /input/i.test(event.target.tagName)) return;
  event.preventDefault();
  $("id").focus();
});
$("find").addEventListener("submit", (event) => {
  event.preventDefault();
  location.hash = `request=${encodeURIComponent($("id").value.trim())}`;
});
$("request").addEventListener("close", () => window.history.replaceState(null, "", location.pathname + location.search));
function follow() {
  const id = new URLSearchParams(location.hash.slice(1)).get("request");
  if (id) open(id);
}
window.addEventListener("hashchange", follow);

const given = new URLSearchParams(location.hash.slice(1)).get("key");
if (given) {
  sessionStorage.setItem("key", given);
  const request = new URLSearchParams(location.hash.slice(1)).get("request");
  window.history.replaceState(null, "", location.pathname + location.search + (request ? `#request=${encodeURIComponent(request)}` : ""));
}
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("key").value);
  $("key").value = "";
});
showHistory();
follow();
poll();
