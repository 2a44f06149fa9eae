"use strict";
const at = id => document.getElementById(id);
const make = (tag, fields = {}, ...inside) => {
  const made = Object.assign(document.createElement(tag), fields);
  made.append(...inside);
  return made;
};
const server = JSON.parse(at("values").textContent);
const may = field => server.fields.includes(field);
const seconds = value => `${value.toFixed(value < 0.1 ? 3 : 2)} s`;

// --- documents ---------------------------------------------------------------------------------

const sample = [
  "The lighthouse on Skarholm was built in 1868 by the brothers Aune, who had never built anything taller than a barn. They measured the rock with a knotted rope and ordered the iron stairs from a shipyard in Bergen. The lamp burned colza oil until 1911, then paraffin, and since 1974 it runs on electricity from the mainland. The last keeper, Signe Hovland, left the island in 1989 and took the logbooks with her; they are in the library at Florvik.",
  "Florvik’s library stands where the herring cannery stood. Its oldest books came from a priest, Jens Torp, who left them to the village on the condition that nobody should ever pay to read them. In 2003 a storm took off half of the roof, and for a winter the books lay in the school’s gymnasium. The reading room has room for twenty people, and on Thursdays the librarian, Amira Dahl, reads aloud to whoever comes.",
  "The ferry Havbris goes from Florvik to Skarholm three times a week from May to September, and once a week in winter if the wind allows. The crossing takes fifty minutes. Dogs travel free, bicycles cost as much as a child. The captain, Ragna Sletten, will not leave with more than sixty passengers, whatever the certificate says, since the summer of 1998, when the engine failed within sight of the pier.",
  "On Skarholm seals come ashore in October to give birth. Counts have been made every year since 1955: there were 40 pups in the first year, 310 in 1987 and 122 after the sickness of 1988. Visitors have to stay behind the stone wall at the north end, and no drone may fly between the first of October and the middle of November. The warden lives in the old keeper’s house and answers letters.",
];

function addDocument(text = "", focus = true) {
  const area = make("textarea", { value: text, spellcheck: false });
  const button = (label, name, act) => {
    const made = make("button", { type: "button", textContent: label, title: name });
    made.dataset.name = name;
    made.onclick = act;
    return made;
  };
  const item = make("li", { className: "document" });
  const row = make("div", { className: "bar" }, make("span", { className: "state" }),
    button("↑", "Move up", () => move(item, -1)), button("↓", "Move down", () => move(item, 1)),
    button("✕", "Remove", () => remove(item)));
  area.onkeydown = event => {
    const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (event.altKey && by) { event.preventDefault(); move(item, by, area); }
  };
  area.oninput = forget;
  item.append(row, area);
  at("documents").append(item);
  if (focus) area.focus();
  number();
}

function move(item, by, focus) {
  const target = by < 0 ? item.previousElementSibling : item.nextElementSibling;
  if (!target) return;
  const held = focus || document.activeElement;
  if (by < 0) target.before(item); else target.after(item);
  number();
  (held.disabled ? item.querySelector("textarea") : held).focus();
}

function remove(item) {
  const next = item.nextElementSibling || item.previousElementSibling;
  item.remove();
  number();
  (next ? next.querySelector("textarea") : at("add")).focus();
}

function shuffle() {
  const items = [...at("documents").children], before = [...items];
  do {
    for (let i = items.length - 1; i > 0; i--) {
      const j = Math.floor(Math.random() * (i + 1));
      [items[i], items[j]] = [items[j], items[i]];
    }
  } while (items.length > 1 && items[0] === before[0]);
  at("documents").append(...items);
  number();
}

const forget = () => document.querySelectorAll(".state").forEach((state, i) => {
  state.className = "state";
  state.textContent = `${i + 1}`;
});

function number() {
  const items = [...at("documents").children];
  items.forEach((item, i) => {
    item.querySelector("textarea").setAttribute("aria-label", `Document ${i + 1}`);
    const [up, down, gone] = item.querySelectorAll("button");
    [up, down, gone].forEach(b => b.setAttribute("aria-label", `${b.dataset.name}: document ${i + 1}`));
    up.disabled = i === 0;
    down.disabled = i === items.length - 1;
  });
  at("shuffle").disabled = items.length < 2;
  forget();
}

const texts = () => [...document.querySelectorAll("#documents textarea")].map(a => a.value.trim()).filter(Boolean);

// --- asking ------------------------------------------------------------------------------------

const headers = () => at("key").value
  ? { "Content-Type": "application/json", Authorization: `Bearer ${at("key").value}` }
  : { "Content-Type": "application/json" };

async function call(path, body, signal) {
  const answer = await fetch(path, body
    ? { method: "POST", headers: headers(), body: JSON.stringify(body), signal } : { headers: headers() });
  if (answer.ok) return answer;
  const told = await answer.text();
  let message = told;
  try { message = JSON.parse(told).error?.message ?? JSON.parse(told).error ?? told; } catch { /* no JSON */ }
  throw new Error(`HTTP ${answer.status}: ${message}`);
}

function messages() {
  const parts = [...texts().map(text => `${text}\n\n`), `Question: ${at("question").value.trim()}`];
  const user = { role: "user", content: parts.map(text => ({ type: "text", text })) };
  const system = at("system").value.trim();
  return system ? [{ role: "system", content: system }, user] : [user];
}

function blendField() {
  const field = {};
  if (may("report")) field.report = true;
  if (may("keep")) field.keep = true;
  if (may("policy") && at("policy").value !== server.policy) field.policy = at("policy").value;
  if (may("recomp_ratio") && +at("ratio").value !== server.ratio) field.recomp_ratio = +at("ratio").value;
  return JSON.stringify(field);
}

/** Streams one answer into its panel; the seconds until its first text, and the report. */
async function stream(panel, more, signal) {
  const text = panel.querySelector(".text"), time = panel.querySelector(".time");
  const start = performance.now();
  const found = { first: null, report: null };
  text.setAttribute("aria-busy", "true");
  try {
    const body = { model: at("models").value, messages: messages(), stream: true, temperature: 0,
      max_tokens: +at("length").value, ...more };
    const reader = (await call("v1/chat/completions", body, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
    for (let left = ""; ;) {
      const { value, done } = await reader.read();
      if (done) break;
      const events = (left + value).split("\n\n");
      left = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: {")) continue;
        const chunk = JSON.parse(event.slice(6));
        if (chunk.error) throw new Error(chunk.error.message);
        const delta = chunk.choices?.[0]?.delta;
        const piece = delta?.content || delta?.reasoning;
        if (piece && found.first === null) {
          found.first = (performance.now() - start) / 1000;
          time.textContent = seconds(found.first);
        }
        if (piece) text.append(piece);
        found.report = chunk.kv_transfer_params?.blend ?? found.report;
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    text.classList.add("wrong");
    text.textContent = error.message;
    found.failed = true;
  } finally {
    text.setAttribute("aria-busy", "false");
  }
  return found;
}

let running = null;

async function ask() {
  if (running) return;
  if (!texts().length || !at("question").value.trim()) {
    at("status").textContent = "It takes a document and a question.";
    return;
  }
  running = new AbortController();
  at("ask").disabled = true;
  at("stop").hidden = false;
  at("prompt").hidden = true;
  forget();
  for (const panel of [at("full"), at("blended")]) {
    panel.querySelector(".text").textContent = "";
    panel.querySelector(".text").classList.remove("wrong");
    panel.querySelector(".time").textContent = "–";
    panel.querySelector("i").style.width = 0;
  }
  at("gain").textContent = "";
  try {
    // one after the other, so that neither waits for the other; the salt keeps this one's blocks apart
    at("status").textContent = "Full prefill …";
    const off = may("off") ? { vllm_xargs: { blend: "off" } } : {};
    const full = await stream(at("full"), { cache_salt: crypto.randomUUID?.() ?? `${Math.random()}`, ...off }, running.signal);
    at("status").textContent = "Blended …";
    const field = blendField();
    const blended = await stream(at("blended"), { vllm_xargs: { blend: field } }, running.signal);
    compare(full, blended);
    if (!blended.failed) await explain(field, blended.report, running.signal);
    at("status").textContent = full.failed || blended.failed ? "Not both were answered." : "Done.";
  } catch (error) {
    at("status").textContent = error.name === "AbortError" ? "Stopped." : error.message;
  }
  running = null;
  at("ask").disabled = false;
  at("stop").hidden = true;
}

function compare(full, blended) {
  const longest = Math.max(full.first ?? 0, blended.first ?? 0);
  for (const [id, { first }] of [["full", full], ["blended", blended]])
    at(id).querySelector("i").style.width = first ? `${Math.max(2, 100 * first / longest)}%` : 0;
  if (full.first && blended.first) at("gain").textContent = `· ${(full.first / blended.first).toFixed(1)}×`;
}

// --- what was computed -------------------------------------------------------------------------

const bytes = (() => { // of the characters that byte-level tokenizers write bytes as
  const found = new Map(), ranges = [[33, 126], [161, 172], [174, 255]];
  for (let byte = 0, next = 256; byte < 256; byte++)
    found.set(String.fromCodePoint(ranges.some(([lo, hi]) => lo <= byte && byte <= hi) ? byte : next++), byte);
  return found;
})();

/** Tokens as the text that they stand for; a character of several tokens stands with its last. */
function decoded(tokens) {
  const isBytes = tokens.some(token => /[ĠĊ]/.test(token)), decoder = new TextDecoder();
  return tokens.map(token => {
    if (!isBytes) return token.replaceAll("▁", " ").replaceAll("<0x0A>", "\n");
    const known = [...token].map(c => bytes.get(c));
    return known.includes(undefined) ? token : decoder.decode(new Uint8Array(known), { stream: true });
  });
}

async function explain(field, report, signal) {
  const asked = { model: at("models").value, messages: messages(), add_generation_prompt: true,
    return_token_strs: true, vllm_xargs: { blend: field } };
  const tokens = decoded((await (await call("tokenize", asked, signal)).json()).token_strs);
  const states = tokens.map(() => "fresh");
  for (const [start, end, state] of report?.spans ?? []) states.fill(state, start, end);
  const paint = [...states];
  for (const [start, end] of report?.recomputed_spans ?? []) paint.fill("recomputed", start, end);
  show(tokens, states, paint);
  const count = state => states.filter(s => s === state).length;
  at("reused").textContent = report?.reused_tokens ?? 0;
  at("recomputed").textContent = report?.recomputed_tokens ?? 0;
  at("cached").textContent = count("cached");
  at("fresh").textContent = tokens.length - count("cached") - (report?.reused_tokens ?? 0);
  at("notice").textContent = notice(report);
  at("prompt").hidden = false;
}

function notice(report) {
  if (!report) return may("report") ? "The server did not say." : "This server’s client_fields do not list report.";
  const why = report.why_not ? `The server says: ${report.why_not}.` : "";
  if (report.missed_chunks) return `${why} New documents: ${report.missed_chunks}, computed now, and kept. Shuffle and ask again.`;
  if (report.cached_chunks && !report.reused_tokens) return `${why} The prompt began as an earlier one did. Shuffle, so that documents stand elsewhere.`;
  return why;
}

/** Paints the tokens, the strip, and each document's state; `paint` also tells recomputed from reused tokens. */
function show(tokens, states, paint) {
  const places = [], starts = [];
  let text = "";
  for (const token of tokens) { starts.push(text.length); text += token; }
  let from = 0;
  for (const own of texts()) {
    const found = text.indexOf(own, from);
    if (found < 0) continue;
    from = found + own.length;
    const within = i => starts[i] >= found && starts[i] < from;
    const inside = states.map((_, i) => i).filter(within);
    places.push({ first: inside[0], last: inside.at(-1) + 1, state: states[inside[inside.length >> 1]] });
  }
  at("tokens").replaceChildren(...runs(0, tokens.length, paint, paint).map(([lo, hi]) =>
    make("span", { className: paint[lo], title: counted(hi - lo, paint[lo]), textContent: tokens.slice(lo, hi).join("") })));
  const owner = [];
  states.forEach((_, i) => { // white space after a document is its own
    const found = places.findIndex(p => p.first <= i && i < p.last);
    owner.push(found < 0 && i && !tokens[i].trim() ? owner[i - 1] : found);
  });
  at("strip").replaceChildren(...runs(0, tokens.length, states, owner).map(([lo, hi]) => {
    const part = make("span", { className: states[lo], textContent: owner[lo] < 0 || hi - lo < 4 ? "" : owner[lo] + 1,
      title: counted(hi - lo, states[lo]) });
    part.style.flexGrow = hi - lo;
    const again = runs(lo, hi, paint, paint).filter(([start]) => paint[start] === "recomputed");
    if (!again.length) return part;
    part.title += `, ${again.reduce((sum, [start, end]) => sum + end - start, 0)} of them recomputed`;
    part.append(marks(hi - lo, again.map(([start, end]) => [start - lo, end - lo])));
    return part;
  }));
  at("strip").setAttribute("aria-label", places.map((p, i) => `Document ${i + 1}: ${p.state}`).join("; "));
  const shown = [...document.querySelectorAll(".document")].filter(d => d.querySelector("textarea").value.trim());
  if (places.length === shown.length) places.forEach(({ first, last, state }, i) => {
    const label = shown[i].querySelector(".state");
    label.className = `state ${state}`;
    label.textContent += ` · ${last - first} tokens, ${state === "cached" ? "in the prefix cache" : state}`;
  });
}

const counted = (number, state) => `${number} ${number === 1 ? "token" : "tokens"}, ${state}`;

/** A band with marks where spans of `width` tokens are; narrow ones blend into a tone, where boxes would round to pixels. */
function marks(width, spans) {
  const band = at("band").content.firstElementChild.cloneNode(true);
  band.setAttribute("viewBox", `0 0 ${width} 1`);
  band.firstElementChild.setAttribute("d", spans.map(([start, end]) => `M${start} 0H${end}V1H${start}Z`).join(""));
  return band;
}

/** [start, end) of the stretches within which both lists stay the same. */
function runs(start, end, states, owner) {
  const found = [];
  for (let lo = start, i = start + 1; i <= end; i++)
    if (i === end || states[i] !== states[lo] || owner[i] !== owner[lo]) { found.push([lo, i]); lo = i; }
  return found;
}

// --- start -------------------------------------------------------------------------------------

async function findModels() {
  try {
    const { data } = await (await call("v1/models")).json();
    at("models").replaceChildren(...data.map(model => make("option", { value: model.id, textContent: model.id })));
    at("model").textContent = `Model: ${data[0].id}.`;
    at("status").textContent = "";
  } catch (error) {
    at("status").textContent = error.message;
  }
}

for (const [name, meaning] of Object.entries(server.policies))
  at("policy").append(make("option", { value: name, textContent: name, title: meaning }));
at("policy").disabled = !may("policy");
[at("ratio").min, at("ratio").max] = server.ratios;
at("ratio").value = server.ratio;
at("ratio").disabled = !may("recomp_ratio");
const percent = () => { at("percent").textContent = `${Math.round(100 * at("ratio").value)}%`; };
at("ratio").oninput = percent;
percent();
sample.forEach(text => addDocument(text, false));
at("question").value = "Who was the last keeper of the lighthouse?";
at("add").onclick = () => addDocument();
at("shuffle").onclick = shuffle;
at("ask").onclick = ask;
at("stop").onclick = () => running?.abort();
at("key").onchange = findModels;
document.querySelector("form").onsubmit = event => event.preventDefault();
document.addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); ask(); }
});
findModels();
