// The user at the other end of a unix socket's connection.
//
// The system knows it, but gRPC does not ask. So each user's connections enter gRPC through an
// acceptor of their own, whose credentials name the user to every call.
#ifndef BALLAST_SERVER_ACCESS_UNIX_USERS_H_
#define BALLAST_SERVER_ACCESS_UNIX_USERS_H_

#include <grpcpp/server_builder.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace ballast::server {

// The property of a connection's grpc::AuthContext with the principal (policy.h): "user:1000". TCP
// connections do not have it.
inline constexpr char kUserProperty[] = "ballast_user";

// Gives a connection to gRPC, which then owns it. Not thread-safe.
using Acceptor = std::function<void(int connection)>;
Acceptor MakeAcceptor(grpc::ServerBuilder& builder,
                      std::shared_ptr<grpc::ServerCredentials> credentials);

// Not thread-safe.
class UnixUsers {
 public:
  static constexpr size_t kMost = 32;

  // Before the server is built. `knows` says whether a principal gets its own acceptor.
  UnixUsers(grpc::ServerBuilder& builder, std::function<bool(const std::string& principal)> knows);

  // A connection of a unix socket. Only the first kMost known users have their own acceptors. All
  // others share one, and are "user:other".
  void Take(int connection);

 private:
  class Names;
  struct OfUser {
    std::shared_ptr<Names> names;
    Acceptor acceptor;
  };
  OfUser AddUser(grpc::ServerBuilder& builder);

  const std::function<bool(const std::string&)> knows_;
  std::vector<OfUser> users_;  // The first `used_` have a name.
  size_t used_ = 0;
  OfUser others_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_ACCESS_UNIX_USERS_H_
