// Draws every section from the data beside it: first the section's own script, then its charts.
"use strict";

(function () {
  const base = {
    margin: { l: 64, r: 16, t: 12, b: 44 },
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: "#1d1d1f" },
    paper_bgcolor: "#fff",
    plot_bgcolor: "#fff",
    hoverlabel: { bgcolor: "#fff", bordercolor: "#555", font: { color: "#1d1d1f" } },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", traceorder: "normal" },
  };
  const axis = { gridcolor: "#e8e8e8", zerolinecolor: "#d0d0d0", linecolor: "#333", ticks: "outside", ticklen: 3, exponentformat: "power" };

  const page = {
    // No button that would send anything anywhere.
    config: {
      displaylogo: false, responsive: true, typesetMath: false, showTips: false,
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
    },
    layout(given) {
      return Object.assign({}, base, given, {
        xaxis: Object.assign({}, axis, { showgrid: false, zeroline: false }, given.xaxis),
        yaxis: Object.assign({}, axis, given.yaxis),
      });
    },
    // Set by the explorer, where the run has positions.
    showHead: null,
  };

  function drawChart(element, chart) {
    Plotly.newPlot(element, chart.data, page.layout(chart.layout), page.config);
    element.on("plotly_click", (event) => {
      const head = event.points[0] && event.points[0].customdata;
      if (page.showHead && Array.isArray(head)) page.showHead(head[0], head[1]);
    });
  }

  for (const script of document.querySelectorAll("script.section-data")) {
    const section = script.closest("section");
    const content = JSON.parse(script.textContent);
    section.querySelectorAll("figure").forEach((figure) => { figure.hidden = false; });
    const draw = (window.reportSections || {})[section.id];
    if (draw) draw(section, content.data, page);
    content.charts.forEach((chart, place) => drawChart(document.getElementById(section.id + "-" + place), chart));
  }

  for (const button of document.querySelectorAll("button.open")) {
    button.hidden = !page.showHead;
    button.addEventListener("click", () => page.showHead(Number(button.dataset.layer), Number(button.dataset.head)));
  }
})();
