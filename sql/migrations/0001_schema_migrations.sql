-- Which migrations this database has run. Engines here and below are for one server: a replicated cluster would need
-- ReplicatedMergeTree and ON CLUSTER in every CREATE, and replicated_deduplication_window beside the window set here.
CREATE TABLE IF NOT EXISTS schema_migrations
(
    number UInt32,
    name String,
    sha256 String,
    applied_at DateTime64(3, 'UTC') DEFAULT now64(3)
)
ENGINE = MergeTree
ORDER BY number
SETTINGS non_replicated_deduplication_window = 100000;
