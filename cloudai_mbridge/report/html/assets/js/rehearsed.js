// What a rehearsal found of the points before the run; a section only if there was one.

const REHEARSED_AT_ONCE = 50;

function rehearsedRow(point) {
  return [
    severalTests ? `${point.test_id}/${point.label}` : point.label,
    point.verdict,
    point.ranks ? `${point.built}/${point.ranks}` : "",
    point.states.parameters === undefined ? "" : count(point.states.parameters),
    point.stack,
    point.reason,
  ];
}

function rehearsedSection() {
  const points = HEAD.rehearsed ?? [];
  if (!points.length) return null;
  const number = (verdict) => points.filter((point) => point.verdict === verdict).length;
  const verdicts = { start: number("starts"), refused: number("refused"), "not evaluated": number("not evaluated") };
  const counts = Object.entries(verdicts).flatMap(([word, found]) => (found ? [`${count(found)} ${word}`] : []));
  const head = ["point", "rehearsal", "ranks built", "parameters of the largest", "software", "why"];
  const rows = points.slice(0, REHEARSED_AT_ONCE).map(rehearsedRow);
  const untold = points.length - rows.length;
  return section("rehearsed", "Rehearsed before the run", [
    h("p", {}, `${counts.join(", ")}. The ranks were built by the training program itself, without a GPU.`),
    region("Rehearsed points", simpleTable(head, rows, { numbers: [2, 3] })),
    untold > 0 ? h("p", { class: "note" }, `${plural(untold, "other point")} in rehearsal.json.`) : null,
  ]);
}
