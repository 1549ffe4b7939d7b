// Draws the charts of `fabricate report --html` from the data in the page. Nothing is loaded, nothing is sent.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const state = { axis: "steps", log: false, zoom: null, hiddenMarks: new Set(["saved"]), hiddenCurves: new Set() };
  let plots = [];

  const several = data.runs.length > 1;
  const label = (curve) => (several ? `${data.runs[curve.run]}: ${curve.name}` : curve.name);

  function style(chart, number) {
    if (!several) return { colour: `--c${number % data.colours}`, dash: undefined };
    const names = [...new Set(chart.curves.map((curve) => curve.name))];
    const dashes = [undefined, [6, 4], [2, 3], [10, 3, 2, 3]];
    const curve = chart.curves[number];
    return { colour: `--c${curve.run % data.colours}`, dash: dashes[names.indexOf(curve.name) % dashes.length] };
  }

  // -- values ----------------------------------------------------------------------------------------------------------

  function number(value) {
    if (value === null || value === undefined) return "";
    const size = Math.abs(value);
    return size && (size < 1e-3 || size >= 1e6) ? Number(value.toPrecision(4)).toExponential() : String(Number(value.toPrecision(5)));
  }

  function duration(seconds) {
    if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
    const two = (part) => String(Math.floor(part)).padStart(2, "0");
    return `${Math.floor(seconds / 3600)}:${two((seconds % 3600) / 60)}:${two(seconds % 60)}`;
  }

  const place = (value) => (state.axis === "seconds" ? duration(value) : value.toLocaleString("en"));

  function columns(chart) {
    const joined = window.uPlot.join(chart.curves.map((curve) => [curve[state.axis], curve.y]));
    return chart.stacked ? stacked(chart, joined) : joined;
  }

  // The curves of a stacked chart on top of each other, the uppermost first: what is drawn later covers what lies below it.
  function stacked(chart, [x, ...ys]) {
    const sums = x.map(() => 0);
    const layers = ys.map((y, k) => y.map((value, i) => (hidden(chart, k) ? sums[i] : (sums[i] += value ?? 0))));
    return [x, ...layers.reverse()];
  }

  const order = (chart) => chart.curves.map((_, k) => (chart.stacked ? chart.curves.length - 1 - k : k));
  const key = (chart, k) => `${chart.title}\n${label(chart.curves[k])}`;
  const hidden = (chart, k) => state.hiddenCurves.has(key(chart, k));

  function range() {
    if (state.zoom) return state.zoom;
    const ends = data.charts.flatMap((chart) => chart.curves.flatMap((c) => [c[state.axis][0], c[state.axis].at(-1)]));
    const [low, high] = [Math.min(...ends), Math.max(...ends)];
    return high > low ? [low, high] : [low - 1, high + 1];
  }

  // -- drawing -----------------------------------------------------------------------------------------------------------

  function drawMarks(plot) {
    const { ctx, bbox } = plot;
    const seen = new Set();
    ctx.save();
    for (const mark of data.marks) {
      if (state.hiddenMarks.has(mark.kind)) continue;
      const x = Math.round(plot.valToPos(state.axis === "steps" ? mark.step : mark.seconds, "x", true));
      const where = mark.kind + x;
      if (x < bbox.left || x > bbox.left + bbox.width || seen.has(where)) continue;
      seen.add(where);
      ctx.strokeStyle = ctx.fillStyle = colour(`--${mark.kind.replace(" ", "-")}`);
      ctx.lineWidth = (mark.kind === "skipped" || mark.kind === "not finite" ? 3 : 1) * devicePixelRatio;
      ctx.setLineDash(mark.kind === "resumed" ? [4, 4] : []);
      const bottom = bbox.top + bbox.height;
      const tall = { resumed: bbox.height, skipped: 14, "not finite": 14, saved: 6, best: bbox.height }[mark.kind];
      ctx.beginPath();
      ctx.moveTo(x, bottom);
      ctx.lineTo(x, bottom - tall * (tall === bbox.height ? 1 : devicePixelRatio));
      ctx.stroke();
      if (mark.kind === "best") {
        ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
        ctx.textAlign = "center";
        ctx.fillText("★", x, bbox.top + 12 * devicePixelRatio);
      }
    }
    ctx.restore();
  }

  function series(chart) {
    const raw = window.uPlot.join(chart.curves.map((curve) => [curve[state.axis], curve.y]));
    return order(chart).map((k) => {
      const look = style(chart, k);
      return {
        label: label(chart.curves[k]),
        show: !hidden(chart, k),
        stroke: () => colour(look.colour),
        fill: chart.stacked ? () => colour(look.colour) : undefined,
        dash: look.dash,
        width: chart.stacked ? 1 : 1.5,
        points: { show: !chart.stacked && chart.curves[k].y.length <= 60, size: 5, fill: () => colour("--card") },
        value: (plot, value, s, i) => number(i === null ? null : raw[k + 1][i]),
      };
    });
  }

  function build(chart, holder) {
    const positive = chart.curves.every((curve) => curve.y.every((y) => y === null || y > 0));
    const grid = { stroke: () => colour("--grid"), width: 1 };
    const whole = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
    const axis = { stroke: () => colour("--faint"), grid, ticks: grid, font: "12px system-ui, sans-serif" };
    const options = {
      width: holder.clientWidth,
      height: holder.clientWidth < 480 ? 220 : 260,
      scales: { x: { time: false, range }, y: { distr: state.log && positive && !chart.stacked ? 3 : 1 } },
      axes: [
        {
          ...axis,
          values: (plot, splits) => splits.map((v) => (v === null ? "" : place(v))),
          space: 70,
          incrs: state.axis === "steps" ? whole : undefined,
        },
        { ...axis, size: 64, values: (plot, splits) => splits.map((v) => (v === null ? "" : number(v))) },
      ],
      cursor: {
        drag: { x: true, y: false, setScale: false },
        sync: { key: "charts", filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
        bind: { dblclick: () => () => zoomTo(null) },
      },
      series: [{ label: state.axis === "steps" ? "step" : "time in fit", value: (plot, v) => (v === null ? "" : place(v)) }, ...series(chart)],
      hooks: {
        draw: [drawMarks],
        setSelect: [
          (plot) => {
            const { left, width } = plot.select;
            if (width > 4) zoomTo([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
          },
        ],
        setSeries: [
          (plot, s, change) => {
            if (s === null || change.show === undefined) return;
            const k = order(chart)[s - 1];
            change.show ? state.hiddenCurves.delete(key(chart, k)) : state.hiddenCurves.add(key(chart, k));
            if (chart.stacked) plot.setData(columns(chart));
          },
        ],
      },
    };
    return new window.uPlot(options, columns(chart), holder);
  }

  function zoomTo(ends) {
    state.zoom = ends;
    root.dataset.zoomed = ends ? ends.map((end) => end.toFixed(2)).join(" ") : "";
    document.getElementById("reset").disabled = !ends;
    const [min, max] = range();
    for (const plot of plots) {
      plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      plot.setScale("x", { min, max });
    }
  }

  function rebuild() {
    plots.forEach((plot) => plot.destroy());
    plots = [...document.querySelectorAll("[data-chart]")].map((holder) => build(data.charts[holder.dataset.chart], holder));
    if (state.zoom) zoomTo(state.zoom);
    root.dataset.drawn = String(plots.length);
  }

  // -- what the reader sets ----------------------------------------------------------------------------------------------

  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    rebuild();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", rebuild);
  document.getElementById("reset").addEventListener("click", () => zoomTo(null));
  document.getElementById("log").addEventListener("change", (event) => {
    state.log = event.target.checked;
    rebuild();
  });
  document.getElementById("axis").addEventListener("change", (event) => {
    state.axis = event.target.value;
    zoomTo(null);
    rebuild();
  });
  for (const box of document.querySelectorAll("[data-mark]")) {
    box.addEventListener("change", () => {
      box.checked ? state.hiddenMarks.delete(box.dataset.mark) : state.hiddenMarks.add(box.dataset.mark);
      plots.forEach((plot) => plot.redraw(false));
    });
  }
  const differences = document.getElementById("differences");
  if (differences) {
    differences.addEventListener("change", () => document.getElementById("plan").classList.toggle("differing", differences.checked));
  }
  let width = 0;
  new ResizeObserver(() => {
    if (root.clientWidth === width) return;
    width = root.clientWidth;
    for (const plot of plots) plot.setSize({ width: plot.root.parentElement.clientWidth, height: plot.height });
  }).observe(root);
  width = root.clientWidth;
  root.classList.add("scripted");
  rebuild();
  root.dataset.milliseconds = performance.now().toFixed(0);
})();
