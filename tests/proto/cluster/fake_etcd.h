// An etcd in this process, with what Ballast uses of it, and with faults that a real one does not have
// at a test's will: an answer that gets lost after the write, a lease that ends at once, tokens that end.
#ifndef BALLAST_TESTS_PROTO_CLUSTER_FAKE_ETCD_H_
#define BALLAST_TESTS_PROTO_CLUSTER_FAKE_ETCD_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "etcd/rpc.grpc.pb.h"

namespace ballast::cluster {

class FakeEtcd {
 public:
  FakeEtcd() : kv_(*this), leases_(*this), auth_(*this) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&kv_);
    builder.RegisterService(&leases_);
    builder.RegisterService(&auth_);
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat("127.0.0.1:", port);
  }
  ~FakeEtcd() { server_->Shutdown(); }

  const std::string& address() const { return address_; }
  // The next write is done, and its answer is lost.
  void LoseNextAnswer() { loses_answer_ = true; }
  void EndLease(int64_t lease) {
    MutexLock lock(mutex_);
    live_.erase(lease);
    std::erase_if(keys_, [&](const auto& each) { return each.second.lease() == lease; });
  }
  // From now on calls need a token, which ends after so many calls.
  void AsksForTokens(std::string password, int calls) {
    MutexLock lock(mutex_);
    password_ = std::move(password);
    calls_of_token_ = calls;
  }
  int tokens() const { return tokens_; }

 private:
  using Context = grpc::ServerContext;

  grpc::Status Admit(const Context& context) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (password_.empty()) return grpc::Status::OK;
    const auto found = context.client_metadata().find("token");
    const bool is_good = found != context.client_metadata().end() &&
                         std::string(found->second.data(), found->second.size()) ==
                             absl::StrCat("token", tokens_.load()) &&
                         calls_left_-- > 0;
    return is_good
               ? grpc::Status::OK
               : grpc::Status(grpc::StatusCode::UNAUTHENTICATED, "etcdserver: invalid auth token");
  }
  void Find(const etcdserverpb::RangeRequest& request, etcdserverpb::RangeResponse& response)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    response.mutable_header()->set_revision(revision_);
    for (const auto& [key, value] : keys_) {
      const bool is_wanted = request.range_end().empty()
                                 ? key == request.key()
                                 : key >= request.key() && key < request.range_end();
      if (is_wanted) *response.add_kvs() = value;
    }
  }

  class Kv final : public etcdserverpb::KV::Service {
   public:
    explicit Kv(FakeEtcd& etcd) : etcd_(etcd) {}
    grpc::Status Range(Context* context, const etcdserverpb::RangeRequest* request,
                       etcdserverpb::RangeResponse* response) override {
      MutexLock lock(etcd_.mutex_);
      if (grpc::Status status = etcd_.Admit(*context); !status.ok()) return status;
      etcd_.Find(*request, *response);
      return grpc::Status::OK;
    }
    grpc::Status Txn(Context* context, const etcdserverpb::TxnRequest* request,
                     etcdserverpb::TxnResponse* response) override {
      MutexLock lock(etcd_.mutex_);
      if (grpc::Status status = etcd_.Admit(*context); !status.ok()) return status;
      bool holds = true;
      for (const etcdserverpb::Compare& compare : request->compare()) {
        const auto found = etcd_.keys_.find(compare.key());
        const int64_t now = found == etcd_.keys_.end() ? 0 : found->second.mod_revision();
        holds = holds && now == compare.mod_revision();
      }
      response->set_succeeded(holds);
      for (const auto& op : holds ? request->success() : request->failure()) {
        if (op.has_request_range()) {
          etcd_.Find(op.request_range(), *response->add_responses()->mutable_response_range());
        } else if (op.has_request_delete_range()) {
          ++etcd_.revision_;
          etcd_.keys_.erase(op.request_delete_range().key());
        } else {
          const etcdserverpb::PutRequest& put = op.request_put();
          if (put.lease() != 0 && !etcd_.live_.contains(put.lease())) {
            return {grpc::StatusCode::NOT_FOUND, "etcdserver: requested lease not found"};
          }
          etcdserverpb::KeyValue& value = etcd_.keys_[put.key()];
          value.set_key(put.key());
          value.set_value(put.value());
          value.set_lease(put.lease());
          value.set_mod_revision(++etcd_.revision_);
        }
      }
      response->mutable_header()->set_revision(etcd_.revision_);
      if (etcd_.loses_answer_.exchange(false)) return {grpc::StatusCode::UNAVAILABLE, "lost"};
      return grpc::Status::OK;
    }

   private:
    FakeEtcd& etcd_;
  };

  class Leases final : public etcdserverpb::Lease::Service {
   public:
    explicit Leases(FakeEtcd& etcd) : etcd_(etcd) {}
    grpc::Status LeaseGrant(Context*, const etcdserverpb::LeaseGrantRequest*,
                            etcdserverpb::LeaseGrantResponse* response) override {
      MutexLock lock(etcd_.mutex_);
      response->set_id(static_cast<int64_t>(etcd_.live_.size()) + 1);
      etcd_.live_.insert(response->id());
      return grpc::Status::OK;
    }
    grpc::Status LeaseKeepAlive(
        Context*, grpc::ServerReaderWriter<etcdserverpb::LeaseKeepAliveResponse,
                                           etcdserverpb::LeaseKeepAliveRequest>* call) override {
      etcdserverpb::LeaseKeepAliveRequest request;
      while (call->Read(&request)) {
        etcdserverpb::LeaseKeepAliveResponse response;
        response.set_id(request.id());
        MutexLock lock(etcd_.mutex_);
        response.set_ttl(etcd_.live_.contains(request.id()) ? 15 : 0);
        call->Write(response);
      }
      return grpc::Status::OK;
    }

   private:
    FakeEtcd& etcd_;
  };

  class Auth final : public etcdserverpb::Auth::Service {
   public:
    explicit Auth(FakeEtcd& etcd) : etcd_(etcd) {}
    grpc::Status Authenticate(Context*, const etcdserverpb::AuthenticateRequest* request,
                              etcdserverpb::AuthenticateResponse* response) override {
      MutexLock lock(etcd_.mutex_);
      if (request->password() != etcd_.password_) {
        return {grpc::StatusCode::INVALID_ARGUMENT, "etcdserver: authentication failed"};
      }
      etcd_.calls_left_ = etcd_.calls_of_token_;
      response->set_token(absl::StrCat("token", ++etcd_.tokens_));
      return grpc::Status::OK;
    }

   private:
    FakeEtcd& etcd_;
  };

  Mutex mutex_;
  std::map<std::string, etcdserverpb::KeyValue> keys_ ABSL_GUARDED_BY(mutex_);
  std::set<int64_t> live_ ABSL_GUARDED_BY(mutex_);  // Leases.
  int64_t revision_ ABSL_GUARDED_BY(mutex_) = 1;
  std::string password_ ABSL_GUARDED_BY(mutex_);  // Empty: no tokens.
  int calls_of_token_ ABSL_GUARDED_BY(mutex_) = 0;
  int calls_left_ ABSL_GUARDED_BY(mutex_) = 0;
  std::atomic<int> tokens_ = 0;
  std::atomic<bool> loses_answer_ = false;
  Kv kv_;
  Leases leases_;
  Auth auth_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

}  // namespace ballast::cluster

#endif  // BALLAST_TESTS_PROTO_CLUSTER_FAKE_ETCD_H_
