-- Instances that were up in a range of time, with the last capacity that each reported.
-- :from = '1970-01-01 00:00:00'  first moment
-- :to = '2106-01-01 00:00:00'  end of the range, not included
SELECT
    instance,
    argMaxIf(capacity_blocks, (ts, seq), capacity_blocks IS NOT NULL) AS capacity_blocks,
    argMax(lifecycle, (ts, seq)) AS last_lifecycle
FROM instance_raw
WHERE ts >= {from:DateTime('UTC')} AND ts < {to:DateTime('UTC')}
GROUP BY instance
HAVING last_lifecycle NOT IN ('down', 'draining')
ORDER BY instance
