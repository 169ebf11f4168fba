// Which user is at the other end of a unix socket's connection.
//
// The system knows it, and gRPC does not ask. So the connections of each user go to gRPC through an
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

// The property of a connection's grpc::AuthContext that has the principal (policy.h): "user:1000".
// Connections of TCP have none.
inline constexpr char kUserProperty[] = "ballast_user";

// Gives a connection, which it owns then, to gRPC. Not thread-safe.
using Acceptor = std::function<void(int connection)>;
Acceptor MakeAcceptor(grpc::ServerBuilder& builder,
                      std::shared_ptr<grpc::ServerCredentials> credentials);

// Not thread-safe.
class UnixUsers {
 public:
  static constexpr size_t kMost = 32;

  // Before the server is built. `knows` says whether a principal is to have an acceptor of its own.
  UnixUsers(grpc::ServerBuilder& builder, std::function<bool(const std::string& principal)> knows);

  // A connection of a unix socket. Those of users beyond the first kMost that are known share an
  // acceptor, and are "user:other".
  void Take(int connection);

 private:
  class Names;
  struct OfUser {
    std::shared_ptr<Names> names;
    Acceptor acceptor;
  };
  OfUser AddUser(grpc::ServerBuilder& builder);

  const std::function<bool(const std::string&)> knows_;
  std::vector<OfUser> users_;  // Of which the first `used_` have a name.
  size_t used_ = 0;
  OfUser others_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_ACCESS_UNIX_USERS_H_
