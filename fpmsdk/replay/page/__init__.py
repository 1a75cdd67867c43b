"""A replay as one self-contained web page; needs plotly (`pip install 'fpmsdk[report]'`).

`charts` makes the data of each picture, `write` the page around them, `page.html` is its frame and `page.js` draws.
"""
