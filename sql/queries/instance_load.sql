-- State of each instance over a range of time: its last lifecycle change, cache use, and queue.
-- :from = '1970-01-01 00:00:00'  first minute
-- :to = '2106-01-01 00:00:00'  end of the range, not included
SELECT
    instance,
    max(ts) AS last_seen,
    argMax(incarnation, (ts, seq)) AS incarnation,
    argMaxIf(lifecycle, (ts, seq), lifecycle != 'heartbeat') AS lifecycle,
    argMax(source_state, (ts, seq)) AS source_state,
    argMax(capacity_blocks, (ts, seq)) AS capacity_blocks,
    avg(used_blocks / nullIf(h.capacity_blocks, 0)) AS used_ratio,
    avg(running) AS running_mean,
    avg(waiting) AS waiting_mean,
    avg(queued_tokens) AS queued_tokens_mean,
    max(queued_tokens) AS queued_tokens_max
FROM
(
    -- An instance's rows go to every partition: each is counted once.
    SELECT * FROM instance_raw
    WHERE ts >= {from:DateTime('UTC')} AND ts < {to:DateTime('UTC')}
    LIMIT 1 BY source, seq
) AS h
GROUP BY instance
ORDER BY instance
