-- The requests that had to compute most prompt tokens although their content was not new, with the causes.
-- :from = '1970-01-01 00:00:00'  first minute
-- :to = '2106-01-01 00:00:00'  end of the range, not included
-- :limit = 20  rows
SELECT
    ts, tenant, instance, request_id, session, prompt_tokens, hit_tokens,
    prompt_tokens - hit_tokens - causes['cold'] - causes['granularity'] AS recomputed_tokens,
    prefill_ms, ttft_ms, causes
FROM access_raw
WHERE ts >= {from:DateTime('UTC')} AND ts < {to:DateTime('UTC')} AND recomputed_tokens > 0
ORDER BY recomputed_tokens DESC, ts, source, seq
LIMIT {limit:UInt32}
