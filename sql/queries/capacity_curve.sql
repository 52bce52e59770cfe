-- Hit ratio of one tenant against cache capacity, exact at every capacity listed (the miss-ratio curve).
-- :tenant  whose curve
-- :from = '1970-01-01 00:00:00'  first minute
-- :to = '2106-01-01 00:00:00'  end of the range, not included
-- :scope = fleet  fleet (one cache for all) or placed (one curve per instance)
SELECT model, block_size, instance, capacity_blocks, hit_blocks, blocks, hit_ratio_blocks, hit_ratio_tokens
FROM mrc(tenant = {tenant:String}, from = {from:DateTime('UTC')}, to = {to:DateTime('UTC')}, scope = {scope:String})
ORDER BY model, block_size, instance, capacity_blocks
