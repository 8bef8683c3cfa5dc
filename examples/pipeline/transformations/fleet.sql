-- The bucket as it is: the newest entry of each key that is not a marker.
CREATE MATERIALIZED VIEW fleet AS
SELECT key AS plane, newest.airport, newest.revision
FROM (
  SELECT key, max_by(struct(operation, airport, revision), struct(stream_created, revision)) AS newest
  FROM fleet_changes
  GROUP BY key
)
WHERE newest.operation = 'PUT';

CREATE MATERIALIZED VIEW delays AS
SELECT airport, count(*) AS reports, avg(delay) AS mean_delay
FROM reports JOIN fleet USING (plane)
GROUP BY airport;
