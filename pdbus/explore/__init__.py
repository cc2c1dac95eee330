"""A replay to explore: one HTML file that needs no network (`pdbus replay --html`, `pdbus plan --html`).

`facts` has the shape of what runs hand over, `figures` makes of it what the page shows, `packing` packs that into
bytes, and `page` writes the file: the packed bytes, Bokeh, and the scripts and the style of this folder.
"""
