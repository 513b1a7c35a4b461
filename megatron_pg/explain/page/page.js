"use strict";
// The data: groups of responses `a` to a prompt `p` in a step `s`. rollout_page.py has a response's fields.
const data = JSON.parse(document.getElementById("data").textContent);
const get = (id) => document.getElementById(id);
const PAGE = 50, CELL_TOKENS = 160, WHOLE_TOKENS = 3000;
const RATIO_NAMES = { new_old: "new / old", old_rollout: "old / rollout", old_ref: "old / reference" };
const ratio = data.ratios[0];

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const number = (x, digits = 3) => (x == null ? "–" : Number.isInteger(x) ? String(x) : x.toFixed(digits).replace("-", "−"));
const count = (x, one, many) => `${x.toLocaleString("en")} ${x === 1 ? one : many}`;
const isActive = (response, at) => !response.m || response.m[at] === "1";
const advantageOf = (response, at) => (Array.isArray(response.a) ? response.a[at] : response.a);

// Only ppo clips a token's ratio to the old log-probs.
const clips = data.clip != null && data.ratios.includes("new_old");

// 2: clipped, without gradient. 1: outside the bounds, with gradient. 0: inside.
function clipOf(response, at) {
  const value = response.new_old?.[at], advantage = advantageOf(response, at);
  if (value == null || !data.clip) return 0;
  const above = value > data.clip[1], below = data.clip[0] != null && value < data.clip[0];
  if (!above && !below) return 0;
  return advantage == null || (above ? advantage > 0 : advantage < 0) ? 2 : 1;
}

function largest(values) {
  let most = null;
  for (const value of values ?? []) if (value != null && !(Math.abs(value) <= Math.abs(most ?? 0) && most != null)) most = value;
  return most;
}

const responses = [];
data.groups.forEach((group, index) => {
  group.kept = data.kept_for?.[index] ?? [];
  for (const response of group.a) {
    response.group = group;
    response.order = responses.length;
    const advantages = Array.isArray(response.a) ? response.a.filter((_, at) => isActive(response, at)) : null;
    response.advantage = advantages ? advantages.reduce((sum, x) => sum + x, 0) / advantages.length : response.a;
    response.largest = ratio ? largest(response[ratio]) : null;
    if (clips && response.new_old) {
      const known = response.new_old.filter((x) => x != null).length;
      response.clipped = known ? response.t.filter((_, at) => clipOf(response, at) === 2).length / known : null;
    }
    responses.push(response);
  }
});

// The text that every prompt begins and ends with is shown only in whole prompts.
const prompts = [...new Map(data.groups.map((group) => [group.p.join(), group.p])).values()];
function commonLength(from) {
  if (prompts.length < 2) return 0;
  const shortest = Math.min(...prompts.map((ids) => ids.length));
  let length = 0;
  while (length < shortest && prompts.every((ids) => from(ids, length) === from(prompts[0], length))) length++;
  return length;
}
const head = commonLength((ids, at) => ids[at]);
const tail = Math.min(commonLength((ids, at) => ids[ids.length - 1 - at]), ...prompts.map((ids) => ids.length - head));

const textOf = (id) => (data.texts ? data.texts[id] ?? `⟨${id}⟩` : String(id));
const joined = (ids) => ids.map(textOf).join(data.texts ? "" : " ");

const COLUMNS = [
  { key: "step", label: "step", value: (x) => x.group.s, shown: (x) => data.steps[x.group.s].name, when: data.steps.length > 1 },
  { key: "prompt", label: "prompt", value: (x) => x.group.g ?? x.order, text: true, when: true },
  { key: "response", label: "response", value: (x) => x.order, text: true, when: true },
  { key: "reward", label: "reward", value: (x) => x.r, when: responses.some((x) => x.r != null) },
  { key: "advantage", label: "advantage", value: (x) => x.advantage, when: responses.some((x) => x.a != null) },
  { key: "tokens", label: "tokens", value: (x) => x.t.length, when: true },
  { key: "ratio", label: "largest log-ratio", value: (x) => x.largest, rank: Math.abs, when: !!ratio },
  { key: "clipped", label: "clipped", value: (x) => x.clipped, shown: (x) => (x.clipped == null ? "–" : `${(100 * x.clipped).toFixed(0)} %`), when: clips },
].filter((column) => column.when);

const COLORS = [
  { key: "advantage", label: "advantage", value: advantageOf, when: responses.some((x) => x.a != null) },
  ...data.ratios.map((name) => ({ key: name, label: `log-ratio ${RATIO_NAMES[name]}`, value: (x, at) => x[name]?.[at], when: true })),
  { key: "clip", label: "clip", when: clips },
  { key: "mask", label: "loss mask", when: true },
].filter((color) => color.when);
for (const color of COLORS) {
  if (!color.value) continue;
  // The color is full at the 99th percentile, so that one outlier does not make all tokens white.
  const sizes = [];
  for (const response of responses) {
    const every = Math.max(1, Math.floor(responses.length / 2000));
    if (response.order % every === 0) response.t.forEach((_, at) => { if (isActive(response, at)) sizes.push(Math.abs(color.value(response, at) ?? 0)); });
  }
  sizes.sort((a, b) => a - b);
  color.full = sizes[Math.floor(0.99 * (sizes.length - 1))] || sizes[sizes.length - 1] || 1;
}

const state = { step: "", color: COLORS[0].key, sort: "step", down: "", find: "", page: 0, open: -1 };
for (const [key, value] of new URLSearchParams(location.hash.slice(1))) if (key in state) state[key] = value;
state.page = Number(state.page) || 0;
state.open = Number(state.open);
if (!COLUMNS.some((column) => column.key === state.sort)) state.sort = "prompt";
if (!COLORS.some((color) => color.key === state.color)) state.color = COLORS[0].key;

function chosen() {
  const column = COLUMNS.find((each) => each.key === state.sort), rank = column.rank ?? ((x) => x);
  const words = state.find.toLowerCase();
  const sign = state.down ? -1 : 1;
  return responses
    .filter((x) => state.step === "" || x.group.s === Number(state.step))
    .filter((x) => !words || joined(x.group.p).toLowerCase().includes(words) || joined(x.t).toLowerCase().includes(words))
    .sort((a, b) => {
      const [first, second] = [column.value(a), column.value(b)];
      if (first == null || second == null) return (first == null) - (second == null) || a.order - b.order;
      return sign * (rank(first) - rank(second)) || a.order - b.order;
    });
}

function colored(span, response, at) {
  if (!isActive(response, at)) {
    span.classList.add("off");
    return;
  }
  const clip = clipOf(response, at);
  if (state.color === "mask") span.style.background = "rgba(var(--high), 0.22)";
  else if (state.color === "clip") {
    if (clip) span.style.background = clip === 2 ? "rgba(var(--alarm), 0.5)" : "rgba(var(--alarm), 0.16)";
  } else {
    const color = COLORS.find((each) => each.key === state.color), value = color.value(response, at);
    const strength = Math.min(1, Math.abs(value ?? 0) / color.full);
    if (strength) span.style.background = `rgba(var(--${value > 0 ? "high" : "low"}), ${(0.6 * strength).toFixed(3)})`;
    if (clip === 2) span.classList.add("clipped");
  }
}

function tokens(response, limit) {
  const made = document.createDocumentFragment();
  response.t.slice(0, limit).forEach((id, at) => {
    const span = element("span", { class: "t", "data-at": at, "data-response": response.order }, textOf(id).replace(/\n/g, "⏎\n") || "∅");
    colored(span, response, at);
    made.append(span);
  });
  return made;
}

function whole(response) {
  const box = element("p", { class: data.texts ? "whole" : "whole ids" }, tokens(response, WHOLE_TOKENS));
  if (response.t.length > WHOLE_TOKENS) {
    const more = element("button", { class: "more", type: "button" }, ` … show ${count(response.t.length - WHOLE_TOKENS, "more token", "more tokens")}`);
    more.onclick = () => box.replaceChildren(tokens(response));
    box.append(more);
  }
  return box;
}

function promptWhole(group) {
  const ids = group.p, end = ids.length - tail, space = data.texts ? "" : " ";
  const part = (from, to, name) => element("span", { class: name }, joined(ids.slice(from, to)));
  return element("p", { class: "whole" }, part(0, head, "template"), space, part(head, end, ""), space, part(end, ids.length, "template"));
}

function detail(response) {
  const group = response.group, cell = element("td", { colspan: COLUMNS.length });
  const step = data.steps.length > 1 ? ` · ${data.steps[group.s].name}` : "";
  const name = group.g == null ? "" : ` · prompt group ${group.g}`;
  cell.append(element("h2", {}, `Prompt${name}${step}`), promptWhole(group));
  const kinds = group.kept.map((kind) => data.kinds[kind]).join(", ");
  cell.append(element("h2", {}, count(group.a.length, "response", "responses") + (kinds ? ` · on this page: ${kinds}` : "")));
  for (const other of [...group.a].sort((a, b) => (b === response) - (a === response) || (b.r ?? 0) - (a.r ?? 0))) {
    const facts = COLUMNS.filter((each) => !each.text && each.key !== "step").map((column) => `${column.label} ${column.shown?.(other) ?? number(column.value(other))}`);
    const line = element("p", { class: "facts" }, [...facts, other.n].join(" · "));
    cell.append(element("div", { class: other === response ? "one this" : "one" }, line, whole(other)));
  }
  return element("tr", { class: "detail" }, cell);
}

function row(response, previous) {
  const made = element("tr", { class: "response", tabindex: 0, "data-response": response.order, "aria-expanded": false });
  for (const column of COLUMNS) {
    if (column.key === "prompt") {
      const ids = response.group.p, own = ids.slice(head, ids.length - tail).slice(-CELL_TOKENS);
      const isSame = previous?.group === response.group;
      const text = isSame ? "″" : joined(own.length ? own : ids);
      made.append(element("td", { class: isSame ? "prompt same" : "prompt" }, element("div", { class: "clamp" }, text)));
    } else if (column.key === "response") {
      const box = element("div", { class: data.texts ? "clamp" : "clamp ids" }, tokens(response, CELL_TOKENS));
      if (response.t.length > CELL_TOKENS) box.append(" …");
      made.append(element("td", { class: "text" }, box));
    } else {
      const name = column.key === "step" ? "" : column.label;
      made.append(element("td", { class: "number", "data-name": name }, column.shown?.(response) ?? number(column.value(response))));
    }
  }
  if (response.order === state.open) made.classList.add("open"), made.setAttribute("aria-expanded", true);
  return made;
}

function drawLegend() {
  const color = COLORS.find((each) => each.key === state.color), legend = get("legend");
  const chip = (style, text) => element("span", {}, element("i", { class: "chip", style }), text);
  legend.replaceChildren();
  if (color.value) {
    const gradient = "linear-gradient(90deg, rgba(var(--low), 0.6), transparent 50%, rgba(var(--high), 0.6))";
    legend.append(element("span", {}, `${color.label}: ${number(-color.full)}`, element("i", { class: "scale", style: `background: ${gradient}` }), number(color.full)));
    if (clips) legend.append(chip("box-shadow: inset 0 -2px rgb(var(--alarm))", "clipped: no gradient"));
  } else if (color.key === "clip") {
    const [low, high] = data.clip.map((bound) => (bound == null ? "0" : Math.exp(bound).toFixed(2)));
    legend.append(chip("background: rgba(var(--alarm), 0.5)", `ratio outside ${low} to ${high}, no gradient`), chip("background: rgba(var(--alarm), 0.16)", "ratio outside, gradient kept"));
  } else legend.append(chip("background: rgba(var(--high), 0.22)", "in the loss"));
  if (responses.some((response) => response.m)) legend.append(element("span", {}, element("span", { class: "t off" }, "gray"), " masked"));
}

function draw() {
  const rows = chosen(), pages = Math.max(1, Math.ceil(rows.length / PAGE));
  state.page = Math.min(state.page, pages - 1);
  const from = state.page * PAGE, body = document.createDocumentFragment();
  rows.slice(from, from + PAGE).forEach((response, at, shown) => {
    body.append(row(response, shown[at - 1]));
    if (response.order === state.open) body.append(detail(response));
  });
  if (!rows.length) body.append(element("tr", {}, element("td", { colspan: COLUMNS.length }, "No match in this step.")));
  document.querySelector("#responses tbody").replaceChildren(body);
  for (const cell of document.querySelectorAll("#responses th")) {
    if (cell.dataset.key === state.sort) cell.setAttribute("aria-sort", state.down ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  }
  for (const hit of document.querySelectorAll("#steps .bar")) hit.classList.toggle("chosen", hit.dataset.step === state.step);
  document.querySelector("#pages span").textContent = rows.length ? `${(from + 1).toLocaleString("en")} to ${Math.min(from + PAGE, rows.length).toLocaleString("en")} of ${count(rows.length, "response", "responses")}` : "";
  get("back").disabled = state.page === 0;
  get("next").disabled = state.page === pages - 1;
  get("step").value = state.step;
  get("sort").value = `${state.sort}${state.down ? " down" : ""}`;
  get("find").value = state.find;
  document.querySelector(`#color input[value="${state.color}"]`).checked = true;
  drawLegend();
  const kept = Object.entries(state).filter(([, value]) => value !== "" && value !== -1 && value !== 0);
  history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
}

function change(values) {
  Object.assign(state, { page: 0 }, values);
  draw();
}

// A small plot of a number by step. A click on a step shows its responses.
const fromTo = (values, shown) => `${shown(values[0])} → ${shown(values[values.length - 1])}`;
const upTo = (values, shown) => `up to ${shown(Math.max(...values))}`;
function figure(key, label, summary, shown) {
  const values = data.steps.map((step) => step[key]), known = values.filter((value) => value != null);
  if (!known.length) return;
  const bottom = Math.min(...known, 0), top = Math.max(...known, 0) || (bottom ? 0 : 1), span = top - bottom, width = 100 / values.length;
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("preserveAspectRatio", "none");
  const rectangle = (name, x, y, w, h, step) => {
    const made = document.createElementNS(svg.namespaceURI, "rect");
    for (const [attribute, value] of Object.entries({ class: name, x, y, width: w, height: h, "data-step": step })) made.setAttribute(attribute, value);
    return made;
  };
  values.forEach((value, step) => {
    if (value != null) {
      const y = (100 * (top - Math.max(value, 0))) / span, height = Math.max((100 * Math.abs(value)) / span, 1);
      svg.append(rectangle("bar", step * width + 0.1 * width, y, 0.8 * width, height, step));
    }
    const hit = rectangle("hit", step * width, 0, width, 100, step), title = document.createElementNS(svg.namespaceURI, "title");
    title.textContent = `${data.steps[step].name}: ${label} ${shown(value)}`;
    hit.append(title);
    hit.onclick = () => change({ step: state.step === String(step) ? "" : String(step) });
    svg.append(hit);
  });
  get("steps").append(element("figure", {}, element("figcaption", {}, element("b", {}, label), summary(known, shown)), svg));
}

function begin() {
  const all = data.steps.reduce((sum, step) => sum + step.responses, 0);
  const groups = count(data.entries, "prompt group", "prompt groups");
  const notes = [`${count(all, "response", "responses")} in ${groups}, ${count(data.steps.length, "step", "steps")}`];
  if (data.estimated) notes.push("advantages computed from rewards (grpo)");
  if (data.skipped) notes.push(`${count(data.skipped, "bad row", "bad rows")} skipped`);
  if (data.steps.length > 1) notes.push("click a bar to show its step");
  get("counts").textContent = notes.join(" · ");
  if (data.kept_for) {
    get("choice").hidden = false;
    document.querySelector("#choice summary").textContent = `${count(responses.length, "response is", "responses are")} on this page, in ${count(data.groups.length, "group", "groups")}: the worst cases and a random selection. Numbers by step cover all responses.`;
    data.kinds.forEach((kind, index) => {
      const kept = data.kept_for.filter((kinds) => kinds.includes(index)).length;
      if (kept) document.querySelector("#choice ul").append(element("li", {}, `${kind}: ${count(kept, "group", "groups")}`));
    });
  }
  if (data.steps.length > 1) {
    get("steps").hidden = false;
    figure("reward", "mean reward", fromTo, (x) => number(x, 2));
    figure("length", "tokens per response", fromTo, (x) => number(x, 1));
    figure("ratio", "largest |log-ratio|", upTo, (x) => number(x, 2));
    if (clips) figure("clipped", "clipped tokens", upTo, (x) => (x == null ? "–" : `${(100 * x).toFixed(1)} %`));
  }
  get("step").append(element("option", { value: "" }, "all"), ...data.steps.map((step, index) => element("option", { value: index }, step.name)));
  get("step").closest("label").hidden = data.steps.length < 2;
  for (const color of COLORS) {
    const input = element("input", { type: "radio", name: "color", value: color.key });
    input.onchange = () => change({ color: color.key, page: state.page });
    get("color").append(element("label", {}, input, element("span", {}, color.label)));
  }
  for (const column of COLUMNS) {
    const button = element("button", { type: "button" }, column.label);
    const down = column.text || column.key === "step" ? "" : "1";
    button.onclick = () => change({ sort: column.key, down: state.sort === column.key ? (state.down ? "" : "1") : down });
    document.querySelector("#responses thead tr").append(element("th", { "data-key": column.key, class: column.text ? "" : "number", scope: "col" }, button));
    for (const [value, arrow] of [["", "↑"], [" down", "↓"]]) get("sort").append(element("option", { value: column.key + value }, `${column.label} ${arrow}`));
  }
  get("step").onchange = (event) => change({ step: event.target.value });
  get("sort").onchange = (event) => change({ sort: event.target.value.split(" ")[0], down: event.target.value.endsWith("down") ? "1" : "" });
  get("find").oninput = (event) => change({ find: event.target.value });
  get("controls").onsubmit = (event) => event.preventDefault();
  get("back").onclick = () => change({ page: state.page - 1 });
  get("next").onclick = () => change({ page: state.page + 1 });
}

function toggle(event) {
  const found = event.target.closest("tr.response");
  if (!found) return;
  const order = Number(found.dataset.response);
  change({ open: state.open === order ? -1 : order, page: state.page });
}
document.querySelector("#responses tbody").addEventListener("click", toggle);
document.querySelector("#responses tbody").addEventListener("keydown", (event) => { if (event.key === "Enter") toggle(event); });

document.addEventListener("mouseover", (event) => {
  const token = event.target.closest?.("span.t[data-at]"), tip = get("tip");
  tip.hidden = !token;
  if (!token) return;
  const response = responses[token.dataset.response], at = Number(token.dataset.at), id = response.t[at];
  const lines = [data.texts ? `${JSON.stringify(textOf(id))}, token ${id}` : `token ${id}`, `position ${at} of ${response.t.length}`];
  if (!isActive(response, at)) lines.push("masked: not in the loss");
  if (advantageOf(response, at) != null) lines.push(`advantage ${number(advantageOf(response, at), 4)}`);
  for (const name of data.ratios) {
    const value = response[name]?.[at];
    if (value != null) lines.push(`log-ratio ${RATIO_NAMES[name]} ${number(value, 4)} (ratio ${Math.exp(value).toPrecision(4)})`);
  }
  if (clipOf(response, at)) lines.push(clipOf(response, at) === 2 ? "clipped: no gradient" : "outside the clip bounds, gradient kept");
  tip.textContent = lines.join("\n");
  const box = token.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = box.bottom + tip.offsetHeight + 12 > innerHeight ? `${box.top - tip.offsetHeight - 6}px` : `${box.bottom + 6}px`;
});

begin();
draw();
