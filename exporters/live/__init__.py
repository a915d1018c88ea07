"""The live page: what an operator looks at first, served by the exporter itself and working offline.

`view` says what is known (values only), `history` remembers the last half hour, `pages` serves; assets/ has the look.
The page is whole without JavaScript; with it the same page is fetched again every few seconds and what changed is
put in place, so there is one rendering of everything but the prefix map and the charts.
"""
