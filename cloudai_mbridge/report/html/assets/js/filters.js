// The text filter and the boxes. Of boxes of one kind, ticked ones widen the choice; none ticked means all.

const MOST_VALUES = 200;
const filters = { words: [], boxes: new Map() };

// What the text filter looks at, in lower case.
const HAYSTACKS = RUNS.map((run) =>
  [
    run.name,
    run.test_name,
    run.verdict,
    ...Object.entries(run.coordinates).map(([axis, value]) => `${axis}=${valueText(value)}`),
    ...run.reasons,
    run.failure?.id ?? "",
    ...run.nodes,
    run.job.job_id ?? "",
  ]
    .join("\n")
    .toLowerCase(),
);

function boxValue(run, kind) {
  return kind === "verdict" ? run.verdict : valueText(coordinate(run, kind.slice("axis:".length)));
}

function passes(run) {
  if (!filters.words.every((word) => HAYSTACKS[run.id].includes(word))) return false;
  for (const [kind, values] of filters.boxes) if (values.size && !values.has(boxValue(run, kind))) return false;
  return true;
}

function applyFilters() {
  state.filtered = RUNS.filter(passes);
  emit("filter");
}

function boxes(kind, title, values) {
  const counts = d3.rollup(
    RUNS,
    (group) => group.length,
    (run) => boxValue(run, kind),
  );
  const chosen = new Set();
  filters.boxes.set(kind, chosen);
  const tick = (value, input) => {
    if (input.checked) chosen.add(value);
    else chosen.delete(value);
    applyFilters();
  };
  const labels = values.slice(0, MOST_VALUES).map((value) => {
    const input = h("input", { type: "checkbox", "data-kind": kind, on: { change: () => tick(value, input) } });
    const text = kind === "verdict" ? verdictMark(value) : shortData(value, 40);
    return h("label", {}, input, text, h("span", { class: "muted" }, `(${count(counts.get(value) ?? 0)})`));
  });
  const rest = values.length - labels.length;
  const note = rest > 0 ? h("p", { class: "note" }, `${count(rest)} more values: use the text filter.`) : null;
  return h("fieldset", {}, h("legend", {}, shortData(title, 40)), h("div", { class: "ticks" }, labels), note);
}

function filterControls() {
  const text = h("input", { type: "search", id: "text-filter", autocomplete: "off", spellcheck: "false" });
  text.addEventListener("input", () => {
    filters.words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    applyFilters();
  });
  const verdicts = boxes(
    "verdict",
    "Verdict",
    VERDICTS.filter((verdict) => RUNS.some((run) => run.verdict === verdict)),
  );
  const axes = AXES.map((axis) => boxes(`axis:${axis}`, axis, axisValues(RUNS, axis)));
  const clear = h("button", { type: "button", id: "clear-filters", on: { click: () => reset() } }, "Clear filters");
  const controls = h(
    "div",
    { class: "no-print", id: "filters" },
    h(
      "div",
      { class: "controls" },
      field("Filter by text (all words; also tp=2, a node, a reason)", text),
      verdicts,
      clear,
    ),
    axes.length
      ? h(
          "details",
          { id: "axis-filters" },
          h("summary", {}, `Filter by coordinate (${AXES.length})`),
          h("div", { class: "axes" }, axes),
        )
      : null,
    h(
      "p",
      { class: "note" },
      "None ticked means all. The charts below show what passes the filter. " +
        "Numbers are means ± standard deviation over the counted steps; a step counts as at most 1.1 x the median. " +
        "The plain means are in report.json.",
    ),
  );
  function reset() {
    text.value = "";
    filters.words = [];
    filters.boxes.forEach((values) => values.clear());
    controls.querySelectorAll("input[type=checkbox]").forEach((input) => (input.checked = false));
    applyFilters();
  }
  return controls;
}
