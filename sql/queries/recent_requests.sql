-- The newest requests by event time, with what became of their prompt tokens.
-- :tenant = ''  one tenant; empty means all
-- :limit = 50  rows
SELECT
    ts, tenant, model, instance, request_id, session, category, outcome, prompt_tokens, hit_tokens,
    if(prompt_tokens = 0, NULL, hit_tokens / prompt_tokens) AS hit_ratio, queue_ms, ttft_ms, causes
FROM access_raw
WHERE {tenant:String} = '' OR tenant = {tenant:String}
ORDER BY ts DESC, source, seq DESC
LIMIT {limit:UInt32}
