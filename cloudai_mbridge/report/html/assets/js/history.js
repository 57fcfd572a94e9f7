// The same points in earlier runs, and where their level moved.

const MOST_CHANGES = 50;

function historySeries() {
  const rows = DATA.history.map((entry) => ({ ...entry, time: new Date(entry.ended_at) }));
  const groups = d3.group(rows, (entry) => JSON.stringify([entry.point, entry.comparability_id]));
  const series = [...groups.values()].map((list, i) => ({
    id: String(i),
    point: list[0].point,
    comparability: list[0].comparability_id,
    rows: d3.sort(list, (entry) => entry.time),
    changes: list.filter((entry) => entry.is_change).length,
  }));
  return d3.sort(
    series,
    (entry) => -entry.changes,
    (entry) => -entry.rows.length,
  );
}

function historySection() {
  const title = "History";
  const series = historySeries();
  if (!series.length)
    return {
      element: section("history", title, emptyLine("No history was given for this report.")),
      onFilter: [],
      onSelection: [],
    };
  const names = [...new Set(DATA.history.flatMap((entry) => Object.keys(entry.values)))].filter(
    (name) => name !== "loss_curve",
  );
  let [chosen, metric] = [series[0], names.includes("step_time_s") ? "step_time_s" : names[0]];
  const chart = historyFigure(
    () => chosen,
    () => metric,
  );
  const label = (entry) =>
    `${shorten(entry.point, 70)} (${plural(entry.rows.length, "run")}, ${plural(entry.changes, "change")})`;
  const points = picker(
    series.map((entry) => [entry.id, label(entry)]),
    chosen.id,
    (id) => ((chosen = series.find((entry) => entry.id === id)), chart.redraw()),
  );
  const metrics = picker(
    names.map((name) => [name, name]),
    metric,
    (name) => ((metric = name), chart.redraw()),
  );
  const element = section(
    "history",
    title,
    h("div", { class: "controls" }, field("Point", points), field("Metric", metrics)),
    chart.element,
    changeList(series),
  );
  return { element, onFilter: [chart.redraw], onSelection: [] };
}

function historyFigure(chosen, metric) {
  const value = (entry) => toNumber(entry.values[metric()]);
  const rows = () => chosen().rows.filter((entry) => isFinal(value(entry)) && !Number.isNaN(entry.time.getTime()));
  const commit = (entry) => String(entry.commit ?? "").slice(0, 12);
  const heading = h("p", {});
  function draw(width) {
    const list = rows();
    heading.replaceChildren(
      data(chosen().point),
      h("span", { class: "muted" }, ` ${metric()}, compared under ${chosen().comparability || "no key"}`),
    );
    if (!list.length) return null;
    const changes = list.filter((entry) => entry.is_change);
    const unit = MEASURE[metric()]?.unit;
    const tip = (entry) =>
      [
        formatTime(entry.ended_at),
        `${formatNumber(value(entry))} ${unit ?? ""}`,
        commit(entry) && `commit ${commit(entry)}`,
        shorten(entry.words ?? "", 160),
      ]
        .filter(Boolean)
        .join("\n");
    return plot(width, {
      height: 300,
      marginLeft: 62,
      marginTop: 40,
      marginBottom: 54,
      x: {
        type: "utc",
        labelOffset: 48,
        label: "end of run (UTC)",
        nice: list.length > 1,
        ticks: Math.max(2, width / 110),
      },
      y: { label: `↑ ${metric()}`, grid: true, nice: true, zero: false },
      marks: [
        Plot.ruleX(changes, { x: "time", stroke: "var(--derived)", strokeDasharray: "4 3" }),
        Plot.line(list, { x: "time", y: value, stroke: "var(--data)", strokeOpacity: 0.6 }),
        Plot.dot(list, { x: "time", y: value, r: 3, fill: "var(--data)" }),
        Plot.dot(changes, {
          x: "time",
          y: value,
          r: 6,
          symbol: "diamond",
          fill: "var(--derived)",
          stroke: "var(--surface)",
        }),
        hover(list, Plot.pointer({ x: "time", y: value, title: tip })),
      ],
    });
  }
  const chart = figure({
    title: "",
    draw,
    label: () =>
      `${metric()} of ${chosen().point}: ${plural(rows().length, "run")}, ${plural(chosen().changes, "change")}.`,
    empty: "No earlier run of this point has that metric.",
    numbers: () => ({
      head: ["ended", "run", "commit", metric(), "change"],
      rows: rows()
        .slice(-500)
        .map((entry) => [
          formatTime(entry.ended_at),
          entry.run_id,
          commit(entry),
          formatNumber(value(entry), 6),
          entry.is_change ? entry.words || "yes" : "",
        ]),
      numbers: [3],
      total: rows().length,
    }),
  });
  chart.element.prepend(heading);
  return chart;
}

function changeList(series) {
  const changes = series.flatMap((entry) => entry.rows.filter((candidate) => candidate.is_change));
  if (!changes.length) return h("p", {}, "No change of level was found.");
  const item = (entry) =>
    h(
      "li",
      {},
      formatTime(entry.ended_at),
      " ",
      shortData(entry.point, 80),
      ": ",
      data(entry.words || "the level moved"),
      (entry.about ?? []).map((line) => h("p", { class: "note" }, data(line))),
    );
  return h(
    "div",
    {},
    h("h3", {}, "Changes of level"),
    gradually(
      d3.sort(changes, (entry) => -entry.time),
      item,
      MOST_CHANGES,
      "changes",
      "ul",
    ),
  );
}
