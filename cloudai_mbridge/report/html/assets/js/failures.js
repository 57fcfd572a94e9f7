// What failed, was skipped or cancelled, grouped by its cause, with what shows it.

const FAILURES_AT_ONCE = 5;
const NOT_FINISHED = { skipped: "Skipped", cancelled: "Cancelled" };

function failureGroups() {
  const broken = RUNS.filter((run) => run.verdict === "failed" || run.verdict in NOT_FINISHED);
  const cause = (run) => (run.verdict in NOT_FINISHED ? run.verdict : (run.failure?.id ?? "no known cause"));
  return d3.sort([...d3.group(broken, cause)], ([, runs]) => -runs.length);
}

function failuresSection() {
  const groups = failureGroups();
  const body = groups.length ? groups.map(failureGroup) : emptyLine("Nothing failed and nothing was skipped.");
  return { element: section("failures", "Failures and their evidence", body), onFilter: [], onSelection: [] };
}

function failureGroup([cause, runs], position) {
  const failure = runs[0].verdict === "failed" ? runs[0].failure : null;
  const title = failure?.title ?? (NOT_FINISHED[cause] ?? "Failed, for no cause that the catalogue knows");
  const summary = h(
    "summary",
    {},
    h("b", {}, data(title)),
    h("span", { class: "muted" }, ` — ${plural(runs.length, "run")}, `, data(cause)),
  );
  const remedy = failure ? h("p", {}, `Kind: ${failure.kind}. Remedy: `, data(failure.remedy)) : null;
  const content = h("div");
  const group = h("details", { class: "failure", "data-print": "", open: position < 3 }, summary, remedy, content);
  const fill = () => content.childElementCount || content.append(gradually(runs, failedRun, FAILURES_AT_ONCE, "runs"));
  group.addEventListener("toggle", () => group.open && fill());
  group.addEventListener("fill", fill);
  if (group.open) fill();
  return group;
}

function failedRun(run) {
  const lines = [...new Set([...(run.failure?.evidence ?? []), ...run.evidence])];
  const nodes = run.failure?.nodes ?? [];
  return h(
    "article",
    { "data-run": String(run.id) },
    h("header", {}, h("h3", {}, data(run.name), " ", verdictMark(run.verdict))),
    h(
      "ul",
      { class: "reasons" },
      run.reasons.map((reason) => h("li", {}, data(reason))),
    ),
    nodes.length ? h("p", {}, "Blamed nodes: ", data(nodes.join(", "))) : null,
    jobLine(run.job),
    lines.length ? h("pre", {}, lines.join("\n")) : h("p", { class: "muted" }, "The logs show nothing of it."),
    run.last_lines.length ? h("p", { class: "muted" }, "The last lines of its logs:") : null,
    run.last_lines.length ? h("pre", {}, run.last_lines.join("\n")) : null,
    run.log.file ? h("p", { class: "note" }, "Log: ", data(run.log.file, { class: "data mono" })) : null,
    run.logs.length ? h("p", { class: "no-print" }, "Open: ", logLinks(run)) : null,
    run.attempts.length
      ? h(
          "div",
          {},
          h("h4", {}, "Attempts"),
          simpleTable(
            ["", "what happened"],
            run.attempts.map((job) => [String(job.number), jobText(job)]),
          ),
        )
      : null,
  );
}

function jobText(job) {
  const parts = [
    job.job_id ? `job ${job.job_id}` : null,
    job.nodes ? `on ${job.nodes}` : null,
    job.state,
    job.exit_code !== undefined ? `exit code ${job.exit_code}` : null,
    job.failure || job.reason,
    job.ended_at ? `ended ${formatTime(job.ended_at)}` : null,
  ];
  return parts.filter(Boolean).join(", ");
}

function jobLine(job) {
  const text = jobText(job);
  return text ? h("p", { class: "note" }, data(text)) : null;
}

// Paper has no triangles to click.
function openForPrint(open) {
  for (const details of document.querySelectorAll("details[data-print]")) {
    if (open && !details.open) details.dataset.wasClosed = "yes";
    if (open) details.dispatchEvent(new Event("fill"));
    if (open) details.open = true;
    else if (details.dataset.wasClosed) {
      details.open = false;
      delete details.dataset.wasClosed;
    }
  }
}
