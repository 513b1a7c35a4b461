// MathJax from beside the pages (ci/site_hooks.py): this script lies in their root.
window.MathJax = {
  messageStyle: "none",
  "HTML-CSS": { availableFonts: [], preferredFont: null, webFont: "STIX-Web", imageFont: null },
  tex2jax: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]] },
};
const script = document.createElement("script");
script.src = document.currentScript.src.replace(/site\.js.*$/, "mathjax/MathJax.js?config=TeX-AMS-MML_HTMLorMML-full,Safe");
document.head.appendChild(script);
