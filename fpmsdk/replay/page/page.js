"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const COLORS = { prefill: "#d9822b", decode: "#2f7fc1", mixed: "#2a9d78", several: "#8a94a0", idle: "#e9edf1" };
  const REPLAYED = "#2f7fc1", MEASURED = "#3b4652";
  const FONT = { family: "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif", size: 12, color: "#1d2733" };
  const GRID = "#e6eaee";
  const CONFIG = { responsive: true, displaylogo: false,
    modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d", "toggleSpikelines"] };
  const MAX_BARS = 2500, BINS = 240;

  const axis = (title, more = {}) => ({ title: { text: title, standoff: 8 }, gridcolor: GRID, zeroline: false,
    linecolor: "#c3cad2", automargin: true, exponentformat: "none", ...more });
  const layout = (more) => ({ font: FONT, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 56, r: 16, t: 32, b: 44 }, hoverlabel: { font: { size: 12 } }, ...more });
  const note = (id, text) => { document.getElementById(`${id}-note`).textContent = text; };
  const panelOf = (parent) => document.getElementById(parent).appendChild(document.createElement("div"));
  const figure = (value) => value == null ? "–" : Math.abs(value) >= 100 ? value.toLocaleString("en", { maximumFractionDigits: 0 })
    : value.toLocaleString("en", { maximumFractionDigits: 2 });
  const seconds = (list) => list.map((ms) => ms / 1000);

  function drawCdfs() {
    for (const panel of data.cdf.panels) {
      const traces = Object.entries(panel.curves).map(([name, curve]) => ({
        x: [curve.x[0], ...curve.x], y: [0, ...curve.y], name, mode: "lines", line: { shape: "hv", width: 2, dash: name === "measured" ? "dot" : "solid",
          color: name === "measured" ? MEASURED : REPLAYED },
        hovertemplate: `%{y:.1%} within %{x:,.4~g} ms<extra>${name}</extra>` }));
      const empty = traces.every((trace) => trace.x[0] === undefined);
      Plotly.newPlot(panelOf("cdf"), traces, layout({ ...(empty ? { annotations: [{ text: "no request has one", showarrow: false,
        xref: "paper", yref: "paper", x: 0.5, y: 0.5 }] } : {}), title: { text: panel.label, x: 0.02, font: { size: 13 } },
        xaxis: axis("ms", { rangemode: "tozero" }), yaxis: axis("", { tickformat: ".0%", range: [0, 1.02] }),
        showlegend: traces.length > 1, legend: { x: 0.98, y: 0.06, xanchor: "right", yanchor: "bottom",
          bgcolor: "rgba(255,255,255,0.8)" } }), CONFIG);
    }
    note("cdf", data.cdf.note);
  }

  // 1, 2 and 5 times powers of ten, so that a log axis reads without thinking.
  function decades(low, high) {
    const values = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
      for (const digit of high / low > 300 ? [1] : high / low > 30 ? [1, 3] : [1, 2, 5]) values.push(digit * 10 ** power);
    }
    return { tickmode: "array", tickvals: values, ticktext: values.map((value) => value.toLocaleString("en")) };
  }

  function drawMeasured() {
    if (!data.measured) return;
    document.getElementById("measured-section").hidden = false;
    for (const panel of data.measured.panels) {
      const known = [...panel.measured, ...panel.replayed].filter((value) => value > 0);
      const ends = [known.reduce((a, b) => Math.min(a, b), Infinity), known.reduce((a, b) => Math.max(a, b), 0)];
      const range = [Math.log10(ends[0]) - 0.05, Math.log10(ends[1]) + 0.05];
      Plotly.newPlot(panelOf("measured"), [
        { x: ends, y: ends, mode: "lines", line: { color: MEASURED, width: 1, dash: "dot" }, hoverinfo: "skip" },
        { x: panel.measured, y: panel.replayed, text: panel.request, mode: "markers",
          marker: { color: REPLAYED, size: 6, opacity: 0.55 },
          hovertemplate: "%{text}<br>measured %{x:,.4~g} ms<br>replayed %{y:,.4~g} ms<extra></extra>" },
      ], layout({ title: { text: panel.label, x: 0.02, font: { size: 13 } }, showlegend: false,
        xaxis: axis("measured, ms", { type: "log", range, ...decades(...ends) }),
        yaxis: axis("replayed, ms", { type: "log", range, ...decades(...ends) }) }), CONFIG);
    }
    note("measured", data.measured.note);
    const rows = [["replayed of measured", "median", "mean", "p90", "error of a request"]];
    for (const panel of data.measured.panels) {
      const found = data.measured.comparison[panel.name];
      const cell = (pair) => `${figure(pair.replayed)} of ${figure(pair.measured)} ms (${pair.error_percent >= 0 ? "+" : "−"}${Math.abs(pair.error_percent).toFixed(1)} %)`;
      rows.push([panel.label, cell(found.p50), cell(found.mean), cell(found.p90),
        `median ${found.request_error_percent.p50.toFixed(1)} %, p90 ${found.request_error_percent.p90.toFixed(1)} %`]);
    }
    const table = document.getElementById("measured-table");
    rows.forEach((cells, index) => {
      const row = table.insertRow();
      for (const text of cells) {
        const element = row.appendChild(document.createElement(index === 0 ? "th" : "td"));
        element.textContent = text;
      }
    });
  }

  function drawTime() {
    const panels = [["batch", "requests in a pass"], ["kv", "KV cache in use"], ["queue", "waiting requests"]];
    const colors = { "prefill requests": COLORS.prefill, "decode requests": COLORS.decode,
      "KV cache in use, %": COLORS.mixed, "waiting requests": "#a34d8e" };
    const traces = [];
    panels.forEach(([key], row) => {
      const yaxis = row === 0 ? "y" : `y${row + 1}`;
      for (const [name, curve] of Object.entries(data.time.panels[key])) {
        const x = seconds(curve.x), shape = data.time.stepped ? "hv" : "hvh";
        const shared = { x, xaxis: "x", yaxis, legendgroup: name, mode: "lines" };
        if (curve.max) {
          traces.push({ ...shared, y: curve.mean, line: { width: 0, shape }, showlegend: false, hoverinfo: "skip" });
          traces.push({ ...shared, y: curve.max, line: { width: 0, shape }, fill: "tonexty",
            fillcolor: `${colors[name]}38`, showlegend: false, name: `${name}, largest`,
            hovertemplate: `%{y:,.4~g}<extra>${name}, largest</extra>` });
        }
        traces.push({ ...shared, y: curve.mean, name, line: { color: colors[name], width: 1.5, shape },
          hovertemplate: `%{y:,.4~g}<extra>${name}${curve.max ? ", mean" : ""}</extra>` });
      }
    });
    const domain = [[0.70, 1], [0.36, 0.64], [0, 0.30]];
    const yaxes = Object.fromEntries(panels.map(([key, title], row) => [row === 0 ? "yaxis" : `yaxis${row + 1}`,
      axis(title, { domain: domain[row], rangemode: "tozero", fixedrange: true, ...(key === "kv" ? { ticksuffix: " %" } : {}) })]));
    Plotly.newPlot("time", traces, layout({ ...yaxes, hovermode: "x unified", xaxis: axis("s", { anchor: "y3", rangemode: "tozero" }),
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, margin: { l: 56, r: 16, t: 40, b: 44 } }), CONFIG);
    note("time", data.time.note);
  }

  const line = data.timeline;
  const last = line.end.reduce((a, b) => Math.max(a, b), 0);

  // Where the passes of each lane begin and end among the bars; starts ascend within a lane.
  const lanes = line.lanes.map((_, lane) => [line.lane.indexOf(lane), line.lane.lastIndexOf(lane) + 1]);

  function inView(from, to) {
    const found = [];
    for (const [first, end] of lanes) {
      let low = first, high = end;
      while (low < high) { const middle = (low + high) >> 1; if (line.end[middle] < from) low = middle + 1; else high = middle; }
      for (let bar = low; bar < end && line.start[bar] <= to; bar += 1) found.push(bar);
    }
    return found;
  }

  function barTraces(found) {
    return line.kinds.map((kind, number) => {
      const bars = found.filter((bar) => line.kind[bar] === number);
      return { type: "bar", orientation: "h", name: kind === "several" ? "several kinds" : kind, marker: { color: COLORS[kind],
        line: { color: "#ffffff", width: found.length < 400 ? 1 : 0 } },
        base: bars.map((bar) => line.start[bar] / 1000), x: bars.map((bar) => (line.end[bar] - line.start[bar]) / 1000),
        y: bars.map((bar) => line.lanes[line.lane[bar]]), width: 0.72,
        text: bars.map((bar) => `${figure(line.start[bar])} to ${figure(line.end[bar])} ms, <b>${figure(line.end[bar] - line.start[bar])} ms</b><br>`
          + `prefill: ${figure(line.prefill_requests[bar])} requests, ${figure(line.prefill_tokens[bar])} tokens<br>`
          + `decode: ${figure(line.decode_requests[bar])} requests over ${figure(line.decode_kv_tokens[bar])} tokens<br>`
          + `waiting: ${figure(line.waiting[bar])}`),
        textposition: "none", hovertemplate: "%{text}<extra></extra>" };
    }).filter((trace) => trace.x.length > 0);
  }

  function shareTraces(found, from, to) {
    const width = (to - from) / BINS, centers = Array.from({ length: BINS }, (_, bin) => (from + (bin + 0.5) * width) / 1000);
    const busy = line.kinds.map(() => new Float64Array(BINS));
    for (const bar of found) {
      const begin = Math.max(line.start[bar], from), end = Math.min(line.end[bar], to);
      for (let bin = Math.max(0, Math.floor((begin - from) / width)); bin < BINS; bin += 1) {
        const low = from + bin * width, overlap = Math.min(end, low + width) - Math.max(begin, low);
        if (low >= end) break;
        if (overlap <= 0) continue;
        const part = overlap / width / line.lanes.length;
        if (line.share_decode) line.kinds.slice(0, 3).forEach((kind, number) => { busy[number][bin] += part * line[`share_${kind}`][bar]; });
        else busy[line.kind[bar]][bin] += part;
      }
    }
    return line.kinds.map((kind, number) => ({ type: "bar", name: kind === "several" ? "several kinds" : kind, x: centers,
      y: Array.from(busy[number]), width: width / 1000, marker: { color: COLORS[kind], line: { width: 0 } },
      hovertemplate: `%{y:.1%} ${kind}<extra></extra>` })).filter((trace) => trace.y.some((value) => value > 0));
  }

  function drawTimeline(from, to) {
    const found = inView(from, to), single = found.length <= MAX_BARS;
    const traces = single ? barTraces(found) : shareTraces(found, from, to);
    const height = single ? Math.max(220, 90 + 34 * line.lanes.length) : 340;
    const yaxis = single ? axis("", { categoryorder: "array", categoryarray: [...line.lanes].reverse(), type: "category",
      range: [-0.6, line.lanes.length - 0.4], fixedrange: true })
      : axis("share of time", { tickformat: ".0%", range: [0, 1.02], fixedrange: true });
    document.getElementById("timeline").style.height = `${height}px`;
    Plotly.react("timeline", traces, layout({ barmode: single ? "overlay" : "stack", bargap: 0, hovermode: "closest", yaxis, height,
      xaxis: axis("s", { range: [from / 1000, to / 1000] }), showlegend: true,
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal" }, margin: { l: 64, r: 16, t: 40, b: 44 } }), { ...CONFIG, doubleClick: false });
    const bars = line.passes_per_bar > 1 ? "bars" : "passes";
    note("timeline", (single ? `${found.length.toLocaleString("en")} ${found.length === 1 ? line.passes_per_bar > 1 ? "bar" : "pass" : bars} in view, each drawn. `
      : `${found.length.toLocaleString("en")} ${bars} in view, too many to draw each: shares of ${BINS} intervals of ${figure((to - from) / BINS)} ms. Zoom in for single ${bars}. `)
      + line.note);
  }

  function show(from, to) {
    const low = Math.max(0, from), high = Math.min(last, Math.max(to, low + 0.01));
    drawTimeline(low, high);
  }

  function zooms() {
    const longest = line.end.reduce((best, end, bar) => end - line.start[bar] > line.end[best] - line.start[best] ? bar : best, 0);
    const queue = line.waiting.reduce((best, waiting, bar) => waiting > line.waiting[best] ? bar : best, 0);
    const around = (bar) => { const half = Math.max(500, 2 * (line.end[bar] - line.start[bar])); return [line.start[bar] - half, line.end[bar] + half]; };
    const ranges = { all: [0, last], first: [0, 1000], longest: around(longest), queue: around(queue) };
    for (const button of document.querySelectorAll("[data-zoom]")) button.addEventListener("click", () => show(...ranges[button.dataset.zoom]));
  }

  drawCdfs();
  drawMeasured();
  drawTime();
  show(0, last);
  document.getElementById("timeline").on("plotly_relayout", (change) => {
    if (change["xaxis.range[0]"] !== undefined) show(change["xaxis.range[0]"] * 1000, change["xaxis.range[1]"] * 1000);
  });
  // What plotly would go back to is the window of the last drawing.
  document.getElementById("timeline").on("plotly_doubleclick", () => show(0, last));
  zooms();
  document.body.dataset.drawn = "true";
})();
