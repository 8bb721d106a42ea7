// How the search of the site orders what it finds: guides before the reference, and the reference before the literate sources.
// The numbers from `objNameMatch` on are those of Sphinx. A name that is typed exactly still finds its reference first.
const ROOMS = {quickstart: 30, howto: 30, tutorials: 20, glossary: 20, results: 10, architecture: 10, api: 10, literate: 0};
var Scorer = {
  score: ([page, _title, _anchor, _text, score]) => score + (ROOMS[page.split("/")[0]] ?? 10),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: {0: 15, 1: 5, 2: -5},
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
