#include "server/unknown_methods.h"

#include <grpcpp/generic/async_generic_service.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/system/version.h"
#include "proto/status.h"

namespace ballast::server {
namespace {

// Of a method that there is not.
class Unknown final : public grpc::ServerGenericBidiReactor {
 public:
  explicit Unknown(const std::string& method) {
    // The name is whatever the client has sent, and as long as it likes; the answer repeats a part.
    Finish(proto::ToGrpc(absl::UnimplementedError(
        absl::StrCat("this service, of release ", BallastVersion(), ", has no method ",
                     method.substr(0, kMostNameBytes),
                     "; see proto/ballast/v1, and whether the client is of a newer release"))));
  }
  void OnDone() override { delete this; }

 private:
  static constexpr size_t kMostNameBytes = 128;
};

class OtherMethods final : public grpc::CallbackGenericService {
  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override {
    return new Unknown(context->method());
  }
};

}  // namespace

std::unique_ptr<grpc::CallbackGenericService> AnswerUnknownMethods(grpc::ServerBuilder& builder) {
  auto others = std::make_unique<OtherMethods>();
  builder.RegisterCallbackGenericService(others.get());
  return others;
}

}  // namespace ballast::server
