// What all runs had in common, and what they had not.

const GROUP_TITLES = {
  environment: "Environment of the runs",
  configuration: "Configuration of the points",
  comparability: "What must be equal for a comparison",
};

function environmentSection() {
  const own = Object.entries(flattenFields(HEAD.environment ?? {}));
  const groups = Object.entries(GROUP_TITLES).map(([id, title]) => differenceGroup(title, DATA.differences[id], id));
  const tool = own.length
    ? collapsed("Where this report was made", fieldTable(own))
    : emptyLine("Where this report was made is not told.");
  return { element: section("environment", "Environment", tool, groups), onFilter: [], onSelection: [] };
}

function flattenFields(fields, prefix = "") {
  const flat = {};
  for (const [name, value] of Object.entries(fields)) {
    if (value && typeof value === "object" && !Array.isArray(value))
      Object.assign(flat, flattenFields(value, `${prefix}${name}.`));
    else flat[`${prefix}${name}`] = valueText(value);
  }
  return flat;
}

function fieldTable(entries) {
  const rows = entries.map(([name, text]) => [data(name), text ?? numberCell(null, "not told")]);
  return region("Fields and values, may scroll", simpleTable(["field", "value"], rows));
}

function collapsed(title, content, open = false) {
  return h("details", { open, "data-print": "" }, h("summary", {}, title), content);
}

function differenceGroup(title, { common, differing }, id) {
  const [same, different] = [Object.entries(common), Object.entries(differing)];
  if (!same.length && !different.length)
    return h("div", {}, h("h3", {}, title), emptyLine("The report tells nothing of it."));
  return h(
    "div",
    { "data-group": id },
    h("h3", {}, title),
    different.length ? differingTable(different, id === "environment") : h("p", {}, "The same in all runs."),
    same.length ? collapsed(`${plural(same.length, "field")} in common`, fieldTable(same)) : null,
  );
}

function differingTable(fields, open) {
  const total = RUNS.filter((run) => run.verdict !== "rejected").length;
  const rows = fields.flatMap(([name, { num_values, values }]) => {
    const usual = 2 * values[0].count > total ? values[0] : null;
    const shown = values.map((value, i) => [
      data(i ? "" : name),
      valueMark(value, usual),
      count(value.count),
      runsOf(value),
    ]);
    const rest = num_values - values.length;
    return rest > 0 ? [...shown, ["", `${count(rest)} more values`, "", ""]] : shown;
  });
  const table = simpleTable(["differs", "value", "runs", "which"], rows, { numbers: [2] });
  return collapsed(
    `${plural(fields.length, "field")} that differ`,
    region("Fields that differ, may scroll", table),
    open,
  );
}

// The odd ones out are marked; where no value prevails, none is.
function valueMark(value, usual) {
  const text = value.text === null ? numberCell(null, "the run does not say") : shortData(value.text, 160);
  return h(
    "span",
    { class: usual && value !== usual ? "differs" : "" },
    usual && value !== usual ? "≠\u00a0" : "",
    text,
  );
}

function runsOf({ count: number, runs }) {
  const names = runs.map((id) => shorten(RUNS[id].name, 40)).join(", ");
  return number > runs.length ? `${names}, …` : names;
}
