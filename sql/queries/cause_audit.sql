-- Tenant-minutes whose causes do not add up to their prompt tokens; must return no row.
SELECT
    window_start,
    tenant,
    sum(prompt) AS prompt_tokens,
    sum(caused) AS cause_tokens,
    sum(hit) AS hit_tokens,
    sum(cause_hit) AS cause_hit_tokens
FROM
(
    SELECT window_start, tenant, prompt_tokens AS prompt, toUInt64(0) AS caused, hit_tokens AS hit, toUInt64(0) AS cause_hit FROM traffic_1m
    UNION ALL
    SELECT window_start, tenant, toUInt64(0), tokens, toUInt64(0), if(cause = 'hit', tokens, 0) FROM cause_1m
)
GROUP BY window_start, tenant
HAVING prompt_tokens != cause_tokens OR hit_tokens != cause_hit_tokens
ORDER BY window_start, tenant
