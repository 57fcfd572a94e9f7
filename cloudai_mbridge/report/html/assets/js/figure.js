// A chart: its heading, its picture with a text for those who do not see it, and its numbers as a table.

const PRINT_WIDTH = 690;
const FONT_SIZE = 12;
const figures = [];

// draw(width) returns an element, or null if there is nothing to draw; label() says in one sentence what it shows;
// numbers() returns {head, rows, numbers, total}; empty: the line that stands for a missing picture.
function figure({ title, draw, label, numbers, empty, note }) {
  const picture = h("div", { class: "plot" });
  const caption = h(
    "figcaption",
    {},
    title ? h("h3", {}, shortData(title, 60)) : null,
    note ? h("p", { class: "note" }, note) : null,
  );
  const table = h("div");
  const alternative = h(
    "details",
    { on: { toggle: () => alternative.open && fill() } },
    h("summary", {}, "The numbers as a table"),
    table,
  );
  const element = h("figure", {}, caption, picture, alternative);

  function fill() {
    const { head, rows, numbers: columns, total = rows.length } = numbers();
    const cut = total > rows.length ? emptyLine(`${count(rows.length)} of ${count(total)} rows.`) : "";
    table.replaceChildren(cut, region(`Numbers: ${title}`, simpleTable(head, rows, { numbers: columns })));
  }
  function redraw() {
    const width = state.printing ? PRINT_WIDTH : Math.max(240, Math.floor(picture.clientWidth));
    const drawing = draw(width);
    if (drawing) asImage(drawing, label());
    picture.replaceChildren(drawing ?? emptyLine(typeof empty === "function" ? empty() : empty));
    alternative.hidden = !drawing;
    if (alternative.open) fill();
  }
  const result = { element, redraw };
  figures.push(result);
  return result;
}

// One image with one text: Plot's labels of parts such as "dot" are for no reader.
function asImage(drawing, label) {
  for (const part of drawing.querySelectorAll("[aria-label]")) {
    part.dataset.mark = part.getAttribute("aria-label");
    part.removeAttribute("aria-label");
  }
  drawing.setAttribute("role", "img");
  drawing.setAttribute("aria-label", label);
}

function plot(width, options) {
  return Plot.plot({
    width,
    height: Math.round(Math.min(380, Math.max(230, width * 0.5))),
    style: { fontSize: `${FONT_SIZE}px`, background: "none" },
    marginTop: 30,
    marginBottom: 46,
    ...options,
    x: { labelOffset: 40, ...options.x },
  });
}

// The room that labels need beside a chart, and how many characters fit into it.
function labelRoom(texts, width) {
  const longest = d3.max(texts, (text) => Array.from(text).length) ?? 0;
  const characters = Math.max(8, Math.min(longest, Math.floor((width * 0.4) / 7.2), 44));
  return { characters, margin: Math.ceil(characters * 7.2) + 14 };
}

// Ticks that do not run into each other: every n-th of the values.
function tickValues(values, room, each) {
  const step = Math.max(1, Math.ceil((values.length * each) / room));
  return values.filter((_, i) => i % step === 0);
}

// What the pointer is near to, in words.
function hover(rows, options) {
  return Plot.tip(rows, { lineHeight: 1.35, ...options });
}

// Many dots must not become one blot.
function dotStyle(number) {
  return { fill: "var(--data)", ...(number > 800 ? { r: 1.7, fillOpacity: 0.35 } : { r: 3, fillOpacity: 0.6 }) };
}

function stepAxis(width, points) {
  const [low, high] = d3.extent(points, (point) => point.x);
  return { label: "step", tickFormat: "d", ticks: Math.max(1, Math.min(width / 70, high - low)), nice: false };
}

function swatch(colour, dash) {
  const svg = d3.create("svg").attr("class", "swatch").attr("viewBox", "0 0 34 12").attr("aria-hidden", "true");
  svg
    .append("line")
    .attr("x2", 34)
    .attr("y1", 6)
    .attr("y2", 6)
    .attr("stroke", colour)
    .attr("stroke-width", 3)
    .attr("stroke-dasharray", dash);
  return svg.node();
}

function legend(entries) {
  return h(
    "ul",
    { class: "legend" },
    entries.map(([colour, dash, text]) => h("li", {}, swatch(colour, dash), text)),
  );
}

function tipText(run, ...lines) {
  return [`${shorten(run.name, 70)} (${run.verdict})`, ...lines].join("\n");
}
