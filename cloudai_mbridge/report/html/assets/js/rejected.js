// Points that never ran, by the rule that they broke, and nodes that were no longer used.

const REJECTED_AT_ONCE = 10;

function rejectedSection() {
  const byRule = new Map();
  for (const run of RUNS) {
    for (const violation of run.violations) {
      if (!byRule.has(violation.rule_id)) byRule.set(violation.rule_id, []);
      byRule.get(violation.rule_id).push({ run, violation });
    }
  }
  const counts = new Map(Object.entries(HEAD.rule_counts ?? {}));
  for (const [rule, broken] of byRule) if (!counts.has(rule)) counts.set(rule, broken.length);
  const rules = d3.sort([...counts], ([, number]) => -number);
  const total = HEAD.num_rejected ?? RUNS.filter((run) => run.verdict === "rejected").length;
  const body = rules.length
    ? [
        h("p", {}, `${plural(total, "point")} rejected before running. A point may break several rules.`),
        rules.map(([rule, number]) => ruleGroup(rule, number, byRule.get(rule) ?? [])),
      ]
    : emptyLine("No point was rejected.");
  return { element: section("rejected", "Rejected points by rule", body), onFilter: [], onSelection: [] };
}

function ruleGroup(rule, number, broken) {
  const example = broken[0]?.violation;
  const content = h("div");
  const fill = () => content.childElementCount || content.append(ruleContent(number, broken));
  const summary = h(
    "summary",
    {},
    h("b", {}, data(rule)),
    ` — ${plural(number, "point")}`,
    example ? h("span", { class: "muted" }, ", for example ", data(`${example.where}: ${example.fact}`)) : null,
  );
  const group = h("details", { class: "rule", "data-print": "" }, summary, content);
  group.addEventListener("toggle", () => group.open && fill());
  group.addEventListener("fill", fill);
  return group;
}

function ruleContent(number, broken) {
  const item = ({ run, violation }) =>
    h("article", {}, h("h4", {}, data(run.name)), h("p", {}, data(violation.message)));
  const untold = number - broken.length;
  return h(
    "div",
    {},
    gradually(broken, item, REJECTED_AT_ONCE, "points"),
    untold > 0
      ? h("p", { class: "note" }, `${count(untold)} more were counted and are not listed in the report.`)
      : null,
  );
}

function excludedSection() {
  const rows = Object.entries(HEAD.excluded_nodes ?? {});
  const body = rows.length
    ? region("Excluded nodes", simpleTable(["node", "why no further job used it"], rows))
    : emptyLine("No node was excluded.");
  return { element: section("excluded", "Excluded nodes", body), onFilter: [], onSelection: [] };
}
