// The table of all runs: sorted by one column, a page at a time.

const PAGE_SIZES = [50, 200, 1000];
const MOST_PRINTED = 2000;
// The fastest first, by what the answer ranks by
const view = { column: DATA.ending.by, direction: DATA.ending.by === "step_time_s" ? 1 : -1, page: 0, size: 200 };

function sortedRuns() {
  const column = COLUMNS.find((candidate) => candidate.id === view.column);
  if (!column) return state.filtered;
  const keyed = state.filtered.map((run) => [column.key(run), run]);
  const compare = (a, b) => compareCells(a[0], b[0], view.direction) || compareRuns(a[1], b[1]);
  return keyed.sort(compare).map(([, run]) => run);
}

function compareRuns(a, b) {
  return AFTER_SUCCESS.indexOf(a.verdict) - AFTER_SUCCESS.indexOf(b.verdict) || a.id - b.id;
}

function sortBy(column) {
  if (view.column !== column.id) Object.assign(view, { column: column.id, direction: 1 });
  else if (view.direction === 1) view.direction = -1;
  else Object.assign(view, { column: null, direction: 1 });
  view.page = 0;
}

function tableSection() {
  const body = h("tbody");
  const counter = h("p", { id: "count", role: "status", "aria-live": "polite" });
  const nothing = emptyLine("No row passes the filter.");
  const pages = h("div", { class: "pages", role: "group", "aria-label": "Pages of the table" });
  const heads = COLUMNS.map((column) => headCell(column, () => (sortBy(column), refresh())));

  function refresh() {
    const runs = sortedRuns();
    const last = Math.max(0, Math.ceil(runs.length / view.size) - 1);
    view.page = Math.min(view.page, last);
    const start = view.page * view.size;
    const shown = state.printing ? runs.slice(0, MOST_PRINTED) : runs.slice(start, start + view.size);
    body.replaceChildren(...shown.flatMap(rows));
    heads.forEach((head, i) => markSort(head, COLUMNS[i]));
    const cut = state.printing && runs.length > MOST_PRINTED ? `; the first ${count(MOST_PRINTED)} are printed` : "";
    const text = `${count(runs.length)} of ${count(RUNS.length)} rows${cut}`;
    if (counter.textContent !== text) counter.textContent = text;
    nothing.hidden = runs.length > 0;
    const focus = pages.contains(document.activeElement) ? document.activeElement.dataset.to : null;
    pages.replaceChildren(...pageControls(runs.length, last, refresh));
    if (focus) pages.querySelector(`[data-to="${focus}"]:not(:disabled), button:not(:disabled)`)?.focus();
  }
  on("filter", () => ((view.page = 0), refresh()));
  on("selection", () => body.querySelectorAll("tr[data-run]").forEach((tr) => markSelected(tr, RUNS[tr.dataset.run])));

  const head = h(
    "thead",
    {},
    h("tr", {}, h("th", { scope: "col", class: "pick" }, h("span", { class: "hidden" }, "draw")), heads),
  );
  const table = h(
    "table",
    { id: "rows" },
    h("caption", { class: "hidden" }, "All runs and rejected points"),
    head,
    body,
  );
  const element = section(
    "table",
    "All points",
    filterControls(),
    counter,
    region("Table of all points, may scroll", table),
    nothing,
    pages,
  );
  return { element, refresh };
}

function headCell(column, sort) {
  const arrow = h("span", { class: "arrow", "aria-hidden": "true" });
  const title = column.kind === "axis" ? shortData(column.title, ONE_LINE) : h("span", {}, column.title);
  const button = h("button", { type: "button", on: { click: sort } }, title, arrow);
  return h("th", { scope: "col", class: column.kind, "aria-sort": "none", "data-column": column.id }, button);
}

function markSort(head, column) {
  const sorted = view.column === column.id ? (view.direction === 1 ? "ascending" : "descending") : "none";
  head.setAttribute("aria-sort", sorted);
  head.querySelector(".arrow").textContent = { ascending: " ▲", descending: " ▼", none: "" }[sorted];
}

// A run, and below it why it is what it is.
function rows(run) {
  const reasons = h("div", { class: "why" }, data(run.reasons.join("\n")));
  const why = h("tr", { class: "why" }, h("td", { class: "pick" }), h("td", { colspan: String(COLUMNS.length) }, reasons));
  return run.reasons.length ? [row(run), why] : [row(run)];
}

function row(run) {
  const pick = h("input", {
    type: "checkbox",
    "aria-label": `Draw ${shorten(run.name, 60)}`,
    disabled: !run.steps.times.length,
  });
  pick.addEventListener("change", () => (setSelected(run, pick.checked), emit("selection")));
  const cells = COLUMNS.map((column) =>
    column.kind === "name"
      ? h("th", { scope: "row", class: "name" }, column.cell(run))
      : h("td", { class: column.kind, "data-label": column.title }, column.cell(run)),
  );
  const tr = h("tr", { "data-run": String(run.id) }, h("td", { class: "pick" }, pick), cells);
  markSelected(tr, run);
  return tr;
}

function markSelected(tr, run) {
  tr.classList.toggle("selected", isSelected(run));
  tr.querySelector("input").checked = isSelected(run);
}

function pageControls(total, last, refresh) {
  const turn = (name, page, disabled) =>
    h(
      "button",
      { type: "button", disabled, "data-to": name, on: { click: () => ((view.page = page), refresh()) } },
      name,
    );
  const resize = (size) => (Object.assign(view, { size: Number(size), page: 0 }), refresh());
  const sizes = PAGE_SIZES.map((size) => [String(size), String(size)]);
  const per = field("rows a page", picker(sizes, String(view.size), resize));
  if (last === 0) return total > PAGE_SIZES[0] ? [per] : [];
  return [
    turn("First page", 0, view.page === 0),
    turn("Previous page", view.page - 1, view.page === 0),
    h("span", { role: "status" }, `page ${count(view.page + 1)} of ${count(last + 1)}`),
    turn("Next page", view.page + 1, view.page === last),
    turn("Last page", last, view.page === last),
    per,
  ];
}
