// Which runs the curves show, with their colours and where their logs are.

function selectionPanel() {
  const status = h("p", { role: "status", id: "selected-count" });
  const table = h("div", { class: "selection" });
  const best = h("button", {
    type: "button",
    id: "select-best",
    on: { click: () => selectOnly(bestRuns(state.filtered, 5)) },
  });
  best.textContent = "Select the best 5 that pass the filter";
  const none = h("button", { type: "button", id: "select-none", on: { click: () => selectOnly([]) } }, "Select none");

  function refresh() {
    const [selected, drawn] = [selectedRuns(), drawnRuns()];
    const cut = selected.length > drawn.length ? `; the first ${drawn.length} with steps are drawn` : "";
    status.textContent = `${plural(selected.length, "run")} selected${cut}. Tick rows of the table to change that.`;
    table.replaceChildren(drawn.length ? drawnTable(drawn) : "");
  }
  on("selection", refresh);
  return { element: h("div", {}, status, h("div", { class: "controls" }, best, none), table), refresh };
}

function drawnTable(runs) {
  const rows = runs.map((run) => [
    swatch(colourOf(run), dashOf(run)),
    shortData(run.name, 80),
    verdictMark(run.verdict),
    run.job.job_id ?? DASH,
    run.nodes.join(" ") || DASH,
    run.log.file ? shortData(run.log.file, 80) : DASH,
    [...(run.log.notes ?? [])].join("; "),
  ]);
  const head = ["line", "point", "verdict", "job", "nodes", "log, below the run's directory", "notes on the log"];
  const used = head.map((_, i) => i < 3 || rows.some((cells) => cells[i] !== DASH && cells[i] !== ""));
  const keep = (cells) => cells.filter((_, i) => used[i]);
  return region("Runs drawn, may scroll", simpleTable(keep(head), rows.map(keep)));
}
