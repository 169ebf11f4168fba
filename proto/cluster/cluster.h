// The services and jobs of a cluster, as etcd has them (ballast/v1/cluster.proto).
//
//   auto cluster = Cluster::Open("etcd://a:2379,b:2379/ballast", access).value();
//   const Cluster::Record record = cluster->FindJob("gpt2").value();
//
// Errors as in etcd.h; also DATA_LOSS: a key is not Ballast's. Lists leave such keys out. Thread-safe.
#ifndef BALLAST_PROTO_CLUSTER_CLUSTER_H_
#define BALLAST_PROTO_CLUSTER_CLUSTER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "ballast/v1/cluster.pb.h"
#include "proto/cluster/etcd.h"

namespace ballast::cluster {

// "etcd://HOST:PORT,HOST:PORT/PREFIX", of which a client also gives "?members=N" or "?members=all".
struct Address {
  std::vector<std::string> endpoints;
  std::string prefix;  // "/ballast".
  // How many services a new job gets: 0: the fewest that have room for it; -1: all.
  int members = 0;
};
bool IsAddress(absl::string_view text);
// INVALID_ARGUMENT, in one line.
absl::StatusOr<Address> ParseAddress(absl::string_view text);

class Cluster {
 public:
  static absl::StatusOr<std::unique_ptr<Cluster>> Open(const Address& address,
                                                       const Etcd::Access& access);

  // FAILED_PRECONDITION: another program keeps keys under the prefix.
  absl::Status Check();

  struct Service {
    v1::ClusterService service;
    int64_t revision = 0;  // 0: there is none.
  };
  absl::StatusOr<std::vector<Service>> Services();
  absl::StatusOr<Service> FindService(const std::string& address);
  absl::StatusOr<int64_t> PutService(const Service& service, int64_t lease);

  struct Record {
    v1::ClusterJob job;
    int64_t revision = 0;  // 0: there is none.
    int64_t lease = 0;     // 0: it stays.
    int64_t now = 0;       // etcd's revision.
  };
  absl::StatusOr<std::vector<Record>> Jobs();
  absl::StatusOr<Record> FindJob(const std::string& name);
  // Writes record.job, with a new nonce, if etcd still has record.revision. Returns the new one.
  // ABORTED: it has changed.
  absl::StatusOr<int64_t> PutJob(Record record, int64_t lease = 0);
  absl::Status DeleteJob(const Record& record);

  Etcd& etcd() { return *etcd_; }
  // For messages: "etcd at a:2379, b:2379, under /ballast".
  const std::string& name() const { return name_; }

 private:
  Cluster(Address address, std::unique_ptr<Etcd> etcd);
  std::string KeyOf(absl::string_view folder, absl::string_view name) const;

  const Address address_;
  const std::unique_ptr<Etcd> etcd_;
  const std::string name_;
};

}  // namespace ballast::cluster

#endif  // BALLAST_PROTO_CLUSTER_CLUSTER_H_
