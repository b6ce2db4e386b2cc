// Brings every section to life with the data beside it: its interactive part by its own script, then its map of heads.
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

  for (const script of document.querySelectorAll("script.section-data")) {
    const section = script.closest("section");
    const content = JSON.parse(script.textContent);
    const draw = (window.reportSections || {})[section.id];
    if (draw && content.data !== null) draw(section, content.data, page);
    if (content.maps.length) window.drawHeadMaps(section.querySelector(".head-maps"), content.maps, page);
  }

  for (const button of document.querySelectorAll("button.open")) {
    button.hidden = !page.showHead;
    button.addEventListener("click", () => page.showHead(Number(button.dataset.layer), Number(button.dataset.head)));
  }
})();
