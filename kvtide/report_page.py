"""The report's page as a `string.Template`: style, skeleton and the script that draws the charts in the reader's colours."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:">
<title>$title</title>
<style>
:root { color-scheme: light dark; --paper:#f6f7f9; --card:#fff; --ink:#1c2430; --soft:#5d6878; --line:#dde2e8;
  --good:#23794f; --bad:#b3263e; }
@media (prefers-color-scheme: dark) {
  :root { --paper:#12161c; --card:#1b2129; --ink:#e6eaf0; --soft:#98a3b3; --line:#313a46; --good:#5cc08d; --bad:#f07085; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--paper); color:var(--ink); font:15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width:1200px; margin:0 auto; padding:20px; }
section { background:var(--card); border:1px solid var(--line); border-radius:10px; padding:16px 18px; margin:0 0 16px; min-width:0; }
h1 { font-size:26px; line-height:1.2; margin:0; overflow-wrap:anywhere; }
h2 { font-size:17px; margin:0 0 8px; } h3 { font-size:15px; margin:0; }
small, .note, .fact span, .verdict span { color:var(--soft); font-weight:400; font-size:13px; } .note { margin:0 0 10px; }
.head { display:flex; flex-wrap:wrap; gap:16px 36px; align-items:center; }
.verdict.alarm h1 { color:var(--bad); } .verdict.quiet h1 { color:var(--good); }
.facts { display:flex; flex-wrap:wrap; gap:10px 28px; } .fact span { display:block; } .fact b { font-size:16px; font-weight:600; }
.good { color:var(--good); } .bad { color:var(--bad); }
.two { display:grid; grid-template-columns:repeat(2, minmax(0, 1fr)); gap:16px; }
.grid { display:grid; grid-template-columns:repeat(auto-fill, minmax(300px, 1fr)); gap:14px; } .card { min-width:0; }
.scroll { overflow-x:auto; } table { border-collapse:collapse; width:100%; font-size:14px; }
th { text-align:left; color:var(--soft); font-weight:500; font-size:13px; }
.n { text-align:right; font-variant-numeric:tabular-nums; white-space:nowrap; } .predicted { white-space:nowrap; }
td, th { padding:6px 14px 6px 0; border-bottom:1px solid var(--line); vertical-align:top; }
td:last-child, th:last-child { padding-right:0; }
ul { margin:6px 0; padding-left:20px; } summary { cursor:pointer; }
pre { overflow-x:auto; background:var(--paper); border:1px solid var(--line); border-radius:6px; padding:10px; font-size:12.5px; }
@media (max-width:820px) { main { padding:10px; } section { padding:12px; } h1 { font-size:21px; }
  .two { grid-template-columns:minmax(0, 1fr); gap:0; }
  .advice table, .advice tbody, .advice tr, .advice td { display:block; } .advice th { display:none; }
  .advice td { border:0; padding:2px 0; text-align:left; }
  .advice td[title]::before { content:attr(title) " "; color:var(--soft); }
  .advice tr { border-bottom:1px solid var(--line); padding:8px 0; } }
</style></head><body><main>
<section class="head">$headline</section>
<section><h2>Hit ratio and load</h2><div id="series"></div></section>
<section><h2>Where the missed prompt tokens went</h2>
<p class="note">Share of all prompt tokens by cause; the rest was served from cache.</p>
<div id="causes"></div></section>
<div class="two"><section><h2>Contributions</h2>
<p class="note">Percentage points; they add up to the change exactly.</p>
<div id="waterfall"></div></section>
<section><h2>Evidence</h2><ul>$evidence</ul><div class="scroll">$groups</div></section></div>
<section class="advice"><h2>What to do</h2><div class="scroll">$advice</div></section>
<section><h2>Tenants</h2><div class="scroll">$tenants</div></section>
<section><h2>Hit ratio against capacity</h2>
<p class="note">Each tenant alone in a cache of so many blocks:
<b style="color:#3b82c4">fleet</b> as if one cache saw all its requests, <b style="color:#e08a3c">placed</b> as they were routed,
capacity split evenly. The distance between the two is what routing costs.</p>$curves</section>
<section><h2>SQL to check it</h2>$queries</section>
</main>
<script>$plotly</script>
<script id="data" type="application/json">$charts</script>
<script>
const charts = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function draw() {
  const narrow = innerWidth < 820;
  for (const [id, figure] of Object.entries(charts)) {
    const layout = structuredClone(figure.layout);
    delete layout.template;
    Object.assign(layout, { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
      font: { color: style("--ink"), size: narrow ? 11 : 12.5, family: getComputedStyle(document.body).fontFamily },
      margin: { l: narrow ? 46 : 58, r: 14, t: 24, b: 40 },
      legend: { orientation: "h", y: -0.16, yanchor: "top", x: 0, bgcolor: "rgba(0,0,0,0)" },
      hoverlabel: { bgcolor: style("--card"), font: { color: style("--ink") } } });
    layout.xaxis ??= {};
    layout.yaxis ??= {};
    if (id === "waterfall") layout.margin.l = narrow ? 92 : 112;
    for (const key of Object.keys(layout).filter(k => /^[xy]axis/.test(k)))
      Object.assign(layout[key], { gridcolor: style("--line"), zerolinecolor: style("--line"), linecolor: style("--line") });
    Plotly.react(id, figure.data, layout, { responsive: true, displayModeBar: false });
  }
}
draw();
dark.addEventListener("change", draw);
</script></body></html>
"""
