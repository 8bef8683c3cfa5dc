import java.util.Map;
import org.apache.iceberg.spark.SparkCatalog;
import org.apache.iceberg.spark.source.SparkTable;
import org.apache.spark.sql.catalyst.analysis.NamespaceAlreadyExistsException;
import org.apache.spark.sql.catalyst.analysis.NoSuchNamespaceException;
import org.apache.spark.sql.catalyst.analysis.NoSuchTableException;
import org.apache.spark.sql.catalyst.analysis.NonEmptyNamespaceException;
import org.apache.spark.sql.catalyst.analysis.TableAlreadyExistsException;
import org.apache.spark.sql.connector.catalog.CatalogV2Util;
import org.apache.spark.sql.connector.catalog.Column;
import org.apache.spark.sql.connector.catalog.Identifier;
import org.apache.spark.sql.connector.catalog.NamespaceChange;
import org.apache.spark.sql.connector.catalog.SupportsNamespaces;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCatalog;
import org.apache.spark.sql.connector.catalog.TableChange;
import org.apache.spark.sql.connector.catalog.TableInfo;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * Iceberg's catalog for Spark 4.1 as Spark 4.3 accepts it: without views, whose interface is
 * another one there, and with the columns of a table by the function that 4.3 has.
 */
public class IcebergTables implements TableCatalog, SupportsNamespaces {
  private final SparkCatalog catalog = new SparkCatalog();

  @Override
  public void initialize(String name, CaseInsensitiveStringMap options) {
    catalog.initialize(name, options);
  }

  @Override
  public String name() {
    return catalog.name();
  }

  @Override
  public Identifier[] listTables(String[] namespace) throws NoSuchNamespaceException {
    return catalog.listTables(namespace);
  }

  @Override
  public Table loadTable(Identifier table) throws NoSuchTableException {
    return new Fitted(catalog.loadTable(table));
  }

  @Override
  public Table createTable(Identifier table, TableInfo info)
      throws TableAlreadyExistsException, NoSuchNamespaceException {
    return new Fitted(catalog.createTable(table, info));
  }

  @Override
  public Table alterTable(Identifier table, TableChange... changes) throws NoSuchTableException {
    return new Fitted(catalog.alterTable(table, changes));
  }

  @Override
  public boolean dropTable(Identifier table) {
    return catalog.dropTable(table);
  }

  @Override
  public void renameTable(Identifier from, Identifier to)
      throws NoSuchTableException, TableAlreadyExistsException {
    catalog.renameTable(from, to);
  }

  @Override
  public void invalidateTable(Identifier table) {
    catalog.invalidateTable(table);
  }

  @Override
  public String[][] listNamespaces() {
    return catalog.listNamespaces();
  }

  @Override
  public String[][] listNamespaces(String[] namespace) throws NoSuchNamespaceException {
    return catalog.listNamespaces(namespace);
  }

  @Override
  public Map<String, String> loadNamespaceMetadata(String[] namespace)
      throws NoSuchNamespaceException {
    return catalog.loadNamespaceMetadata(namespace);
  }

  @Override
  public void createNamespace(String[] namespace, Map<String, String> metadata)
      throws NamespaceAlreadyExistsException {
    catalog.createNamespace(namespace, metadata);
  }

  @Override
  public void alterNamespace(String[] namespace, NamespaceChange... changes)
      throws NoSuchNamespaceException {
    catalog.alterNamespace(namespace, changes);
  }

  @Override
  public boolean dropNamespace(String[] namespace, boolean cascade)
      throws NoSuchNamespaceException, NonEmptyNamespaceException {
    return catalog.dropNamespace(namespace, cascade);
  }

  private static class Fitted extends SparkTable {
    Fitted(Table table) {
      super(((SparkTable) table).table());
    }

    @Override
    public Column[] columns() {
      return CatalogV2Util.structTypeToV2Columns(schema(), false);
    }
  }
}
