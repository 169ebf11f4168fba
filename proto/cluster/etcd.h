// A client of etcd, for a few small keys: each call blocks, and tries one endpoint after the other.
//
//   auto etcd = Etcd::Create({"a:2379", "b:2379"}, Etcd::Access::FromEnvironment()).value();
//   const int64_t revision = etcd->PutIf("/ballast/jobs/gpt2", 0, text).value();
//
// Errors beside those named: UNAVAILABLE, no endpoint answered, each within kCallTimeout; a write may
// then have been done. PERMISSION_DENIED: etcd refuses the user. Thread-safe.
#ifndef BALLAST_PROTO_CLUSTER_ETCD_H_
#define BALLAST_PROTO_CLUSTER_ETCD_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/security/credentials.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "etcd/rpc.pb.h"

namespace ballast::cluster {

class Etcd {
 public:
  static constexpr absl::Duration kCallTimeout = absl::Seconds(5);

  // As `etcdctl` has them. All but `user` are paths; empty: not used.
  struct Access {
    std::string ca;    // With it connections use TLS.
    std::string cert;  // This client's certificate, and its key.
    std::string key;
    std::string user;
    std::string password_file;  // One word; other users must not be able to read it.

    // From BALLAST_ETCD_CA, _CERT, _KEY, _USER and _PASSWORD_FILE.
    static Access FromEnvironment();
  };
  // INVALID_ARGUMENT, in one line: a file is missing or wrong, or does not belong to the rest.
  static absl::StatusOr<std::unique_ptr<Etcd>> Create(std::vector<std::string> endpoints,
                                                      const Access& access);

  struct Entry {
    std::string key;
    std::string value;
    int64_t revision = 0;  // Of the last change of this key.
    int64_t lease = 0;     // 0: none.
  };
  struct Listing {
    std::vector<Entry> entries;  // By key.
    int64_t revision = 0;        // Of etcd. It rises with each change of any key.
  };
  // All keys that begin with `prefix`, which is not empty.
  absl::StatusOr<Listing> List(const std::string& prefix);
  // Of one key, or none.
  absl::StatusOr<Listing> Get(const std::string& key);

  // Writes the key if its last change is still `revision`; 0: if there is no such key. Returns the
  // new revision. ABORTED: it has changed. `value` differs from that of all other writers and calls:
  // if an answer was lost, the key's value says whether it was written. NOT_FOUND: no such lease.
  absl::StatusOr<int64_t> PutIf(const std::string& key, int64_t revision, const std::string& value,
                                int64_t lease = 0);
  // ABORTED: it has changed, or there is none.
  absl::Status DeleteIf(const std::string& key, int64_t revision);

  // A lease: its keys are deleted when it was not kept alive for `time`. Returns its number.
  absl::StatusOr<int64_t> Grant(absl::Duration time);
  // NOT_FOUND: it is over.
  absl::Status KeepAlive(int64_t lease);
  absl::Status Revoke(int64_t lease);

  // For messages: "a:2379, b:2379".
  const std::string& name() const { return name_; }

 private:
  Etcd(std::vector<std::string> endpoints, Access access,
       const std::shared_ptr<grpc::ChannelCredentials>& credentials);
  using Call = std::function<grpc::Status(const std::shared_ptr<grpc::Channel>& channel,
                                          grpc::ClientContext& context)>;
  // Until an endpoint has answered, from the one that has answered last.
  absl::Status Try(const Call& call);
  absl::Status TryAt(size_t endpoint, const Call& call);
  // The token for this user, a new one with `again`; empty without one.
  absl::StatusOr<std::string> Token(const std::shared_ptr<grpc::Channel>& channel, bool again);
  absl::StatusOr<Listing> Range(const etcdserverpb::RangeRequest& request);
  // If the key's last change is still `revision`; otherwise the answer has the key.
  absl::StatusOr<etcdserverpb::TxnResponse> WriteIf(const std::string& key, int64_t revision,
                                                    const etcdserverpb::RequestOp& write);

  const std::vector<std::string> endpoints_;
  const std::string name_;
  const Access access_;
  std::vector<std::shared_ptr<grpc::Channel>> channels_;
  Mutex mutex_;
  size_t first_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string token_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::cluster

#endif  // BALLAST_PROTO_CLUSTER_ETCD_H_
