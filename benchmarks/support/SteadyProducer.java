import java.nio.ByteBuffer;
import java.time.Instant;
import java.util.Properties;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/** Part of benchmarks.latency: sends records at a constant rate, each with its time in ns. */
public class SteadyProducer {
    public static void main(String[] arguments) throws Exception {
        String servers = arguments[0];
        String topic = arguments[1];
        long rate = Long.parseLong(arguments[2]);
        long count = Long.parseLong(arguments[3]);
        Properties settings = new Properties();
        settings.put("bootstrap.servers", servers);
        ByteArraySerializer serializer = new ByteArraySerializer();
        try (KafkaProducer<byte[], byte[]> producer =
                new KafkaProducer<>(settings, serializer, serializer)) {
            producer.partitionsFor(topic); // connects before the first record
            long began = System.nanoTime();
            long sent = 0;
            while (sent < count) {
                long due = Math.min(count, (System.nanoTime() - began) * rate / 1_000_000_000L);
                Instant now = Instant.now();
                byte[] value = ByteBuffer.allocate(8)
                        .putLong(now.getEpochSecond() * 1_000_000_000L + now.getNano())
                        .array();
                for (; sent < due; sent++) {
                    producer.send(new ProducerRecord<>(topic, value));
                }
                Thread.sleep(1);
            }
        }
    }
}
