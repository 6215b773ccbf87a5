"""HTML report: one offline page, figures and tables made from run records.

Data flow: `experiments` groups the records, `best` selects settings, `contours` computes surfaces,
and `style` assigns colours and markers. `figures` and `tables` write the static files; `page_data`
and `page` write the HTML page from the same numbers; `folder` writes all of them.
"""
