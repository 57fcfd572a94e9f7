// Put the page together, then draw, and draw again when the choice, the width or the medium changes.

function redrawAll() {
  figures.forEach((chart) => chart.redraw());
}

function start() {
  showHeadline();
  showLive();
  bestRuns(RUNS, 5).forEach((run) => setSelected(run, true));
  const table = tableSection();
  const curves = curvesSection();
  const drawn = [
    curves,
    distributionSection(),
    sensitivitySection(),
    parallelSection(),
    paretoSection(),
    predictedSection(),
    nodesSection(),
  ];
  const told = [failuresSection(), rejectedSection(), excludedSection(), historySection(), environmentSection()];
  const parts = [...drawn, ...told];
  const sections = [gateSection(), table.element, nodeMapSection(), searchesSection(), rehearsedSection(), ...parts.map((part) => part.element)].filter(Boolean);
  document.getElementById("main").replaceChildren(...sections);
  showContents(sections);
  showFooter();

  const onFilter = parts.flatMap((part) => part.onFilter);
  on("filter", later(onFilter));
  on("selection", later(parts.flatMap((part) => part.onSelection)));
  on("selection", () => announce(document.getElementById("selected-count").textContent));
  table.refresh();
  curves.refresh();
  redrawAll();
  onFilter.filter((draw) => !figures.some((chart) => chart.redraw === draw)).forEach((draw) => draw());

  followWidth();
  followPrint(table);
  recall();
  document.documentElement.dataset.state = "ready";
}

function announce(text) {
  document.getElementById("announcements").textContent = text;
}

function followWidth() {
  const redraw = later([redrawAll]);
  let width = document.documentElement.clientWidth;
  addEventListener("resize", () => {
    if (document.documentElement.clientWidth === width || state.printing) return;
    width = document.documentElement.clientWidth;
    redraw();
  });
}

// On paper: every row, every detail, and charts as wide as the paper.
function followPrint(table) {
  const change = (printing) => {
    if (state.printing === printing) return;
    state.printing = printing;
    table.refresh();
    openForPrint(printing);
    redrawAll();
  };
  addEventListener("beforeprint", () => change(true));
  addEventListener("afterprint", () => change(false));
  matchMedia("print").addEventListener("change", (event) => change(event.matches));
}

start();
