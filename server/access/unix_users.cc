#include "server/access/unix_users.h"

#include <grpcpp/security/auth_metadata_processor.h>
#include <grpcpp/security/server_credentials.h>
#include <sys/socket.h>

#include <utility>

#include "cpu_optimizer_service/common/system/mutex.h"
#include "server/access/policy.h"

namespace ballast::server {

Acceptor MakeAcceptor(grpc::ServerBuilder& builder,
                      std::shared_ptr<grpc::ServerCredentials> credentials) {
  auto acceptor = std::shared_ptr(builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
      std::move(credentials)));
  return [acceptor = std::move(acceptor)](int connection) {
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters parameters;
    parameters.fd = connection;
    acceptor->HandleNewConnection(&parameters);
  };
}

// Names the user to a connection before its first call is handled. A later call finds the name
// there: nothing is added while another thread reads. Thread-safe.
class UnixUsers::Names final : public grpc::AuthMetadataProcessor {
 public:
  void Set(std::string principal) {
    MutexLock lock(mutex_);
    principal_ = std::move(principal);
  }
  std::string principal() {
    MutexLock lock(mutex_);
    return principal_;
  }

  // Process does not wait, so gRPC may call it on its own threads.
  bool IsBlocking() const override { return false; }
  grpc::Status Process(const InputMetadata&, grpc::AuthContext* connection, OutputMetadata*,
                       OutputMetadata*) override {
    MutexLock lock(mutex_);
    if (connection->FindPropertyValues(kUserProperty).empty()) {
      connection->AddProperty(kUserProperty, principal_);
    }
    return grpc::Status::OK;
  }

 private:
  Mutex mutex_;
  std::string principal_ ABSL_GUARDED_BY(mutex_);
};

UnixUsers::UnixUsers(grpc::ServerBuilder& builder,
                     std::function<bool(const std::string& principal)> knows)
    : knows_(std::move(knows)) {
  // gRPC takes acceptors only before its server is built, when no user has come yet.
  for (size_t i = 0; i < kMost; ++i) users_.push_back(AddUser(builder));
  others_ = AddUser(builder);
  // No line of the roles can name it, since users are numbers there. Only * fits it.
  others_.names->Set("user:other");
}

UnixUsers::OfUser UnixUsers::AddUser(grpc::ServerBuilder& builder) {
  OfUser user = {.names = std::make_shared<Names>(), .acceptor = {}};
  // They change nothing of what is sent.
  auto credentials = grpc::experimental::LocalServerCredentials(UDS);
  // gRPC's insecure credentials take no processor; these do.
  credentials->SetAuthMetadataProcessor(user.names);
  user.acceptor = MakeAcceptor(builder, std::move(credentials));
  return user;
}

void UnixUsers::Take(int connection) {
  // The user of the process that connected, as of then (unix(7)).
  ucred peer = {};
  socklen_t bytes = sizeof(peer);
  if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) {
    return others_.acceptor(connection);
  }
  const std::string principal = UserPrincipal(peer.uid);
  for (size_t i = 0; i < used_; ++i) {
    if (users_[i].names->principal() == principal) return users_[i].acceptor(connection);
  }
  if (used_ == users_.size() || !knows_(principal)) return others_.acceptor(connection);
  // The name is set before the connection goes on: its first call asks for it.
  users_[used_].names->Set(principal);
  users_[used_++].acceptor(connection);
}

}  // namespace ballast::server
