-- Requests stored more than once; must return no row.
SELECT partition, source, count() AS rows, uniqExact(seq) AS distinct_rows, rows - distinct_rows AS duplicates
FROM access_raw
GROUP BY partition, source
HAVING duplicates > 0
ORDER BY partition, source
