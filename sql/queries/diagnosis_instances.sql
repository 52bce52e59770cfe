-- Each instance's capacity, state and cumulative counters by minute, and how often it lost its cache.
-- :to = '2106-01-01 00:00:00'  end of the range, not included; all before it is read, since state lasts until it changes
SELECT
    toInt64(toUnixTimestamp(toStartOfMinute(ts))) AS window_s,
    instance,
    incarnation,
    ifNull(toFloat64(argMaxIf(h.capacity_blocks, (ts, seq), h.capacity_blocks IS NOT NULL)), 0) AS capacity_blocks,
    argMaxIf(h.lifecycle, (ts, seq), h.lifecycle != 'heartbeat') AS last_change,
    toInt64(countIf(h.lifecycle IN ('down', 'cleared'))) AS lost,
    toFloat64(max(h.query_tokens)) AS query_tokens,
    toFloat64(max(h.hit_tokens)) AS hit_tokens
FROM
(
    -- An instance's rows may have been written by several partitions: each is counted once.
    SELECT * FROM instance_raw
    WHERE ts < {to:DateTime('UTC')}
    LIMIT 1 BY source, seq
) AS h
GROUP BY window_s, instance, incarnation
ORDER BY window_s, instance, incarnation
