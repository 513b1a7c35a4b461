// MathJax from beside the pages (ci/site_hooks.py): this script lies in their root.
window.MathJax = {
  messageStyle: "none",
  "HTML-CSS": { availableFonts: [], preferredFont: null, webFont: "STIX-Web", imageFont: null, mtextFontInherit: true }, // its "_" of typewriter text looks like "-"
  tex2jax: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]] },
};
const script = document.createElement("script");
script.src = document.currentScript.src.replace(/site\.js.*$/, "mathjax/MathJax.js?config=TeX-AMS-MML_HTMLorMML-full,Safe");
document.head.appendChild(script);

// To the search a dash before a word is an operator, and its index has "&amp;" for "&". So it reads --use-tis as the words
// use and tis, both required; what stands in the field stays as typed.
const field = document.querySelector("input.md-search__input");
const typed = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value");
const words = (flag) => flag.split("-").filter(Boolean).map((word) => `+${word}*`).join(" ");
Object.defineProperty(field, "value", {
  get: () => typed.get.call(field).replace(/&/g, "&amp;").replace(/(?<!\S)--[\w-]+/g, words),
  set: (text) => typed.set.call(field, text),
});

// No line ends within a flag, least of all after its dashes, nor within -exp(x), 1e-6 and 2026-11-28.
const texts = document.createTreeWalker(document.querySelector("article") ?? document.body, NodeFilter.SHOW_TEXT);
const dashed = /((?<![\w-])--?[a-z][\w-]*|\b[\d.]+e-\d+|\b\d{4}-\d\d-\d\d)/;
const found = [];
while (texts.nextNode()) {
  const text = texts.currentNode;
  if (dashed.test(text.data) && !text.parentNode.closest(".arithmatex, script")) found.push(text);
}
for (const text of found) {
  text.replaceWith(...text.data.split(dashed).map((part, at) => {
    if (at % 2 === 0) return part;
    const flag = document.createElement("span");
    flag.className = "flag";
    flag.textContent = part;
    return flag;
  }));
}
