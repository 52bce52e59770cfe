-- Accesses of a range of time in order of look-up, with their chains: what the fleet emulator replays.
-- :from = '1970-01-01 00:00:00'  first moment
-- :to = '2106-01-01 00:00:00'  end of the range, not included
SELECT
    toUnixTimestamp64Micro(ts) AS ts_us, tenant, model, instance, request_id, session, category, turn, prompt_tokens, hit_tokens,
    block_size, chain, output_tokens, queue_ms, prefill_ms, ttft_ms, router, outcome
FROM access_raw
WHERE ts >= {from:DateTime('UTC')} AND ts < {to:DateTime('UTC')}
ORDER BY ts, source, seq
