// Writes or reads a bucket with the codecs of orbit.go's kvcodec, for the tests of codecs.
//
//	kvcodec URL BUCKET KEY_CODECS VALUE_CODECS put|delete < entries
//	kvcodec URL BUCKET KEY_CODECS VALUE_CODECS list > entries
//
// Codecs are names in the order in which they encode, separated by commas; empty for none. An entry
// is a line of JSON: {"key": …, "value": Base64}. "list" writes the entries that have a value.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/synadia-io/orbit.go/kvcodec"
)

type entry struct {
	Key   string `json:"key"`
	Value []byte `json:"value"`
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(arguments []string) error {
	url, name, keys, values, action := arguments[0], arguments[1], arguments[2], arguments[3], arguments[4]
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	connection, err := nats.Connect(url)
	if err != nil {
		return err
	}
	defer connection.Close()
	js, err := jetstream.New(connection)
	if err != nil {
		return err
	}
	plain, err := js.KeyValue(ctx, name)
	if err != nil {
		return err
	}
	keyCodec, err := keyCodec(keys)
	if err != nil {
		return err
	}
	valueCodec, err := valueCodec(values)
	if err != nil {
		return err
	}
	bucket := kvcodec.New(plain, keyCodec, valueCodec)
	if action == "list" {
		return list(ctx, bucket)
	}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var one entry
		if err := json.Unmarshal(lines.Bytes(), &one); err != nil {
			return err
		}
		if action == "delete" {
			err = bucket.Delete(ctx, one.Key)
		} else {
			_, err = bucket.Put(ctx, one.Key, one.Value)
		}
		if err != nil {
			return fmt.Errorf("%s of key %q: %w", action, one.Key, err)
		}
	}
	return lines.Err()
}

func list(ctx context.Context, bucket jetstream.KeyValue) error {
	watcher, err := bucket.WatchAll(ctx, jetstream.IgnoreDeletes())
	if err != nil {
		return err
	}
	defer watcher.Stop()
	output := json.NewEncoder(os.Stdout)
	for one := range watcher.Updates() {
		if one == nil {
			return nil
		}
		if err := output.Encode(entry{one.Key(), one.Value()}); err != nil {
			return err
		}
	}
	return fmt.Errorf("the watch ended before its initial values")
}

func keyCodec(names string) (kvcodec.KeyCodec, error) {
	var chain []kvcodec.KeyCodec
	for _, name := range split(names) {
		switch name {
		case "base64":
			chain = append(chain, kvcodec.Base64Codec())
		case "path":
			chain = append(chain, kvcodec.PathCodec())
		default:
			return nil, fmt.Errorf("unknown codec %q", name)
		}
	}
	if len(chain) == 0 {
		return kvcodec.NoOpCodec(), nil
	}
	return kvcodec.NewKeyChainCodec(chain...)
}

func valueCodec(names string) (kvcodec.ValueCodec, error) {
	var chain []kvcodec.ValueCodec
	for _, name := range split(names) {
		if name != "base64" {
			return nil, fmt.Errorf("unknown codec %q", name)
		}
		chain = append(chain, kvcodec.Base64Codec())
	}
	if len(chain) == 0 {
		return kvcodec.NoOpCodec(), nil
	}
	return kvcodec.NewValueChainCodec(chain...)
}

func split(names string) []string {
	return strings.FieldsFunc(names, func(r rune) bool { return r == ',' })
}
