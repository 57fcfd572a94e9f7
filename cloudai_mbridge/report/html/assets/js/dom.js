// Elements are made here and nowhere else. Children that are strings become text nodes: data never is markup.

function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "class") element.className = value;
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

const ONE_LINE = 24;
const MORE_AT_ONCE = 50;

// Text that a report brought along: kept as it is, and its direction of writing kept to itself.
function data(text, properties) {
  const short = Array.from(String(text)).length <= ONE_LINE;
  return h("bdi", { class: short ? "data short" : "data", ...properties }, String(text));
}

// Long text in a small place: shortened for the eye, whole for the pointer and for whoever listens.
function shortData(text, length) {
  const short = shorten(text, length);
  if (short === text) return data(text);
  return h("span", { title: text }, data(short, { "aria-hidden": "true" }), h("span", { class: "hidden" }, text));
}

function section(id, title, ...children) {
  return h("section", { id, "aria-labelledby": `${id}-title` }, h("h2", { id: `${id}-title` }, title), children);
}

function emptyLine(text) {
  return h("p", { class: "empty" }, text);
}

// head: texts. rows: arrays of texts or elements; the first cell of a row names it.
function simpleTable(head, rows, { caption, numbers = [] } = {}) {
  const kind = (column) => (numbers.includes(column) ? { class: "number" } : {});
  const cell = (value) => (value instanceof Node ? value : data(value));
  const body = rows.map((row) =>
    h(
      "tr",
      {},
      row.map((value, i) =>
        i ? h("td", { ...kind(i), "data-label": head[i] }, cell(value)) : h("th", { scope: "row", ...kind(0) }, cell(value)),
      ),
    ),
  );
  return h(
    "table",
    {},
    caption ? h("caption", { class: "hidden" }, caption) : null,
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        head.map((text, i) => h("th", { scope: "col", ...kind(i) }, text)),
      ),
    ),
    h("tbody", {}, body),
  );
}

// A part that scrolls by itself must be reachable by keyboard.
function region(label, ...children) {
  return h("div", { class: "region", role: "region", "aria-label": label, tabindex: "0" }, children);
}

function field(label, control) {
  return h("label", { class: "field" }, h("span", {}, label), control);
}

function picker(options, value, change) {
  const select = h(
    "select",
    { on: { change: () => change(select.value) } },
    options.map(([id, text]) => h("option", { value: id, selected: id === value }, text)),
  );
  return select;
}

// A list that may be long: some now, more on request.
function gradually(items, make, first, label, tag = "div") {
  const list = h(tag);
  const more = h("button", { class: "no-print", type: "button", on: { click: () => show() } });
  let shown = 0;
  function show(number = MORE_AT_ONCE) {
    list.append(...items.slice(shown, shown + number).map(make));
    shown = Math.min(items.length, shown + number);
    more.hidden = shown >= items.length;
    const next = Math.min(MORE_AT_ONCE, items.length - shown);
    more.textContent = `Show ${count(next)} more of ${count(items.length)} ${label}`;
  }
  show(first);
  const note = items.length > first ? h("p", { class: "note" }, `There are ${count(items.length)} ${label}.`) : null;
  return h("div", {}, list, more, note);
}
