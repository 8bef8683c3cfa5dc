import com.fasterxml.jackson.core.json.JsonWriteFeature;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.json.JsonMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import io.debezium.engine.ChangeEvent;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.format.Json;
import io.debezium.engine.spi.OffsetCommitPolicy;
import io.nats.client.Connection;
import io.nats.client.JetStream;
import io.nats.client.JetStreamApiException;
import io.nats.client.JetStreamSubscription;
import io.nats.client.KeyValue;
import io.nats.client.Message;
import io.nats.client.Nats;
import io.nats.client.Options;
import io.nats.client.PushSubscribeOptions;
import io.nats.client.api.KeyValueConfiguration;
import io.nats.client.api.PublishAck;
import io.nats.client.api.StorageType;
import io.nats.client.api.StreamConfiguration;
import io.nats.client.api.StreamInfo;
import io.nats.client.impl.Headers;
import java.io.IOException;
import java.io.Reader;
import java.io.UncheckedIOException;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import org.apache.kafka.connect.runtime.WorkerConfig;
import org.apache.kafka.connect.storage.MemoryOffsetBackingStore;

/**
 * Publishes the changes of Postgres tables to a JetStream stream, by Debezium's embedded engine.
 *
 * <p>{@code java -cp "classes:lib/*" PostgresToJetStream settings.properties}. The file has the
 * settings of Debezium's Postgres connector, {@code nats.url} and {@code nats.stream}. The subject
 * of a change is {@code <topic.prefix>.<schema>.<table>}, its payload is Debezium's JSON.
 *
 * <p>The process ends with status 1 when the engine fails. Start it again then: the engine resumes
 * at the stored offset, and publishes again what followed it. The initial snapshot does not resume,
 * it begins again: see {@link #deletePublishedRows}.
 */
public final class PostgresToJetStream
    implements DebeziumEngine.ChangeConsumer<ChangeEvent<String, String>> {

  private static final String OFFSETS_BUCKET = "debezium-offsets";
  private static final long ACK_SECONDS = 10;
  private static final String KEY_HEADER = "Debezium-Key";
  // A header of NATS is ASCII.
  private static final ObjectMapper JSON =
      JsonMapper.builder().enable(JsonWriteFeature.ESCAPE_NON_ASCII).build();

  private final JetStream jetStream;
  private final String transactions;

  private PostgresToJetStream(JetStream jetStream, String prefix) {
    this.jetStream = jetStream;
    this.transactions = prefix + ".transaction";
  }

  public static void main(String[] arguments) throws Exception {
    Properties settings = defaults();
    try (Reader file = Files.newBufferedReader(Path.of(arguments[0]))) {
      settings.load(file);
    }
    String prefix = settings.getProperty("topic.prefix");
    try (Connection connection = connect(settings.getProperty("nats.url"))) {
      connection
          .jetStreamManagement()
          .addStream(
              StreamConfiguration.builder()
                  .name(settings.getProperty("nats.stream"))
                  .subjects(prefix + ".>")
                  .storageType(StorageType.File)
                  .build());
      PostgresToJetStream sink = new PostgresToJetStream(connection.jetStream(), prefix);
      if (!isSnapshotComplete(connection)) {
        sink.deletePublishedRows(connection, settings.getProperty("nats.stream"));
      }
      System.out.println("publishing to stream " + settings.getProperty("nats.stream"));
      boolean[] failed = {false};
      DebeziumEngine<ChangeEvent<String, String>> engine =
          DebeziumEngine.create(Json.class)
              .using(settings)
              .using(OffsetCommitPolicy.always())
              .using(
                  (success, message, error) -> {
                    failed[0] = !success;
                    if (!success) {
                      System.err.println("the engine ended: " + message + " " + error);
                    }
                  })
              .notifying(sink)
              .build();
      engine.run();
      if (failed[0]) {
        System.exit(1);
      }
    }
  }

  private static Properties defaults() {
    Properties settings = new Properties();
    settings.setProperty("name", "postgres-to-jetstream");
    settings.setProperty("connector.class", "io.debezium.connector.postgresql.PostgresConnector");
    settings.setProperty("plugin.name", "pgoutput");
    settings.setProperty("publication.autocreate.mode", "filtered");
    settings.setProperty("offset.storage", Offsets.class.getName());
    // Values that Spark reads as DECIMAL, DATE and TIMESTAMP.
    settings.setProperty("decimal.handling.mode", "string");
    settings.setProperty("time.precision.mode", "isostring");
    settings.setProperty("tombstones.on.delete", "false");
    // The ends of transactions, see handleBatch.
    settings.setProperty("provide.transaction.metadata", "true");
    for (String converter : List.of("key.converter", "value.converter")) {
      settings.setProperty(converter + ".schemas.enable", "false");
    }
    return settings;
  }

  static Connection connect(String url) throws IOException, InterruptedException {
    return Nats.connect(new Options.Builder().server(url).maxReconnects(-1).build());
  }

  private static boolean isSnapshotComplete(Connection connection)
      throws IOException, JetStreamApiException, InterruptedException {
    List<byte[]> offsets = new ArrayList<>(Offsets.read(offsetsBucket(connection)).values());
    for (byte[] offset : offsets) {
      JsonNode value = JSON.readTree(offset);
      if (value.has("snapshot") && !value.path("snapshot_completed").asBoolean()) {
        return false;
      }
    }
    return !offsets.isEmpty();
  }

  /**
   * Publishes a delete for each row of a snapshot that was interrupted.
   *
   * <p>The next snapshot does not have the rows that were deleted since, and Debezium does not send
   * these deletes. Their lsn is 0: they are older than each change, as rows of a snapshot are.
   */
  private void deletePublishedRows(Connection connection, String stream)
      throws IOException, JetStreamApiException, InterruptedException {
    StreamInfo info = connection.jetStreamManagement().getStreamInfo(stream);
    long last = info.getStreamState().getLastSequence();
    if (last == 0) {
      return;
    }
    JetStreamSubscription messages =
        jetStream.subscribe(
            ">", PushSubscribeOptions.builder().stream(stream).ordered(true).build());
    long sequence = 0;
    while (sequence < last) {
      Message message = messages.nextMessage(Duration.ofSeconds(ACK_SECONDS));
      if (message == null) {
        throw new IOException("could not read stream " + stream + ": no message after " + sequence);
      }
      sequence = message.metaData().streamSequence();
      JsonNode event = JSON.readTree(message.getData());
      if (event.path("op").asText().equals("r")) {
        ObjectNode delete = JSON.createObjectNode().put("op", "d").putNull("after");
        delete.set("before", JSON.readTree(message.getHeaders().getFirst(KEY_HEADER)));
        delete.putObject("source").put("lsn", 0);
        jetStream.publish(message.getSubject(), JSON.writeValueAsBytes(delete));
      }
    }
    messages.unsubscribe();
  }

  private static KeyValue offsetsBucket(Connection connection)
      throws IOException, JetStreamApiException {
    connection
        .keyValueManagement()
        .create(
            KeyValueConfiguration.builder()
                .name(OFFSETS_BUCKET)
                .storageType(StorageType.File)
                .build());
    return connection.keyValue(OFFSETS_BUCKET);
  }

  /**
   * Publishes a batch, then marks the ends of its transactions and its snapshot rows as processed.
   *
   * <p>An offset inside a transaction is not stored: Debezium 3.6.3 loses rows of a COPY when it
   * resumes there.
   */
  @Override
  public void handleBatch(
      List<ChangeEvent<String, String>> events,
      DebeziumEngine.RecordCommitter<ChangeEvent<String, String>> committer)
      throws InterruptedException {
    while (!publish(events)) {
      // The server stored a part of the batch, perhaps. Repeats are harmless: the order of a key's
      // changes is that of their lsn.
      TimeUnit.SECONDS.sleep(1);
    }
    for (ChangeEvent<String, String> event : events) {
      if (isResumable(event)) {
        committer.markProcessed(event);
      }
    }
    committer.markBatchFinished();
  }

  private boolean publish(List<ChangeEvent<String, String>> events) throws InterruptedException {
    List<CompletableFuture<PublishAck>> acks = new ArrayList<>(events.size());
    try {
      for (ChangeEvent<String, String> event : events) {
        if (event.value() != null) {
          byte[] payload = event.value().getBytes(StandardCharsets.UTF_8);
          acks.add(jetStream.publishAsync(event.destination(), headers(event), payload));
        }
      }
      for (CompletableFuture<PublishAck> ack : acks) {
        ack.get(ACK_SECONDS, TimeUnit.SECONDS);
      }
      return true;
    } catch (ExecutionException | TimeoutException | IllegalStateException error) {
      System.err.println("could not publish, trying again: " + error);
      return false;
    }
  }

  private static Headers headers(ChangeEvent<String, String> event) {
    try {
      Headers headers = new Headers();
      if (event.key() != null) {
        headers.put(KEY_HEADER, JSON.writeValueAsString(JSON.readTree(event.key())));
      }
      return headers;
    } catch (IOException error) {
      throw new UncheckedIOException(error);
    }
  }

  private boolean isResumable(ChangeEvent<String, String> event) {
    try {
      JsonNode value = event.value() == null ? null : JSON.readTree(event.value());
      if (value == null) {
        return false;
      }
      return event.destination().equals(transactions)
          ? value.path("status").asText().equals("END")
          : value.path("op").asText().equals("r");
    } catch (IOException error) {
      throw new UncheckedIOException(error);
    }
  }

  /** Keeps Debezium's offsets in a bucket beside the stream: a write is complete, or absent. */
  public static final class Offsets extends MemoryOffsetBackingStore {
    private String url;
    private Connection connection;
    private KeyValue bucket;

    @Override
    public void configure(WorkerConfig config) {
      super.configure(config);
      url = config.originalsStrings().get("nats.url");
    }

    @Override
    public void start() {
      super.start();
      try {
        connection = connect(url);
        bucket = offsetsBucket(connection);
        read(bucket)
            .forEach((key, value) -> data.put(ByteBuffer.wrap(decoded(key)), ByteBuffer.wrap(value)));
      } catch (IOException | JetStreamApiException | InterruptedException error) {
        throw new IllegalStateException("could not read the offsets", error);
      }
    }

    static Map<String, byte[]> read(KeyValue bucket)
        throws IOException, JetStreamApiException, InterruptedException {
      Map<String, byte[]> offsets = new HashMap<>();
      for (String key : bucket.keys()) {
        offsets.put(key, bucket.get(key).getValue());
      }
      return offsets;
    }

    private static byte[] decoded(String key) {
      return Base64.getUrlDecoder().decode(key);
    }

    @Override
    protected void save() {
      for (Map.Entry<ByteBuffer, ByteBuffer> offset : data.entrySet()) {
        String key =
            Base64.getUrlEncoder().withoutPadding().encodeToString(offset.getKey().array());
        try {
          bucket.put(key, offset.getValue().array());
        } catch (IOException | JetStreamApiException error) {
          throw new IllegalStateException("could not store the offset", error);
        }
      }
    }

    @Override
    public void stop() {
      try {
        if (connection != null) {
          connection.close();
        }
      } catch (InterruptedException error) {
        Thread.currentThread().interrupt();
      }
      super.stop();
    }

    @Override
    public Set<Map<String, Object>> connectorPartitions(String connector) {
      return Set.of();
    }
  }
}
