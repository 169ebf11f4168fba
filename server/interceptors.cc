#include "server/interceptors.h"

#include <google/protobuf/descriptor.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/server_interceptor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/system/version.h"
#include "server/call_guard.h"

namespace ballast::server {
namespace {

using grpc::experimental::InterceptionHookPoints;

// Of "/ballast.v1.JobService/GetJob".
const google::protobuf::MethodDescriptor* FindMethod(const char* path) {
  const std::string name =
      absl::StrReplaceAll(absl::StripPrefix(path == nullptr ? "" : path, "/"), {{"/", "."}});
  return google::protobuf::DescriptorPool::generated_pool()->FindMethodByName(name);
}

// Of one call.
class OfCall final : public grpc::experimental::Interceptor {
 public:
  // `request`: the message that the call takes.
  OfCall(const grpc::ServerContextBase& context, std::string request, ResetWatch& resets)
      : context_(context), request_(std::move(request)), resets_(resets) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_MESSAGE)) {
      // All our methods take bytes.
      const auto* const request = static_cast<const grpc::ByteBuffer*>(methods->GetRecvMessage());
      // Such as a call that was reset: it is answered before that is noticed.
      has_no_request_ = request == nullptr || !request->Valid();
      if (has_no_request_) (void)GuardedRun([this] { resets_.GivenUp(context_.peer()); });
    }
    // The refused call of an unknown caller costs more than one that is given up, so it counts as
    // one (README, "What a hostile peer can still cost").
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS) &&
        methods->GetSendStatus().error_code() == grpc::StatusCode::UNAUTHENTICATED) {
      (void)GuardedRun([this] { resets_.GivenUp(context_.peer()); });
    }
    // Whatever has become of a call without its request, this says what is wrong with it.
    if (has_no_request_ &&
        methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) {
      End(*methods, [this] {
        return WithReason(
            absl::InvalidArgumentError(absl::StrCat("no request came; send a ", request_)),
            reason::kMalformedMessage);
      });
    } else if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS) &&
               methods->GetSendStatus().error_code() == grpc::StatusCode::UNIMPLEMENTED &&
               methods->GetSendStatus().error_message().empty()) {
      // So gRPC ends a call of which an exception has left the method.
      End(*methods, [] { return OutOfMemoryError(); });
    }
    // A call without a request has been counted above.
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_CLOSE) &&
        !has_no_request_ && context_.IsCancelled()) {
      (void)GuardedRun([this] { resets_.GivenUp(context_.peer()); });
    }
    methods->Proceed();
  }

 private:
  template <typename Make>
  static void End(grpc::experimental::InterceptorBatchMethods& methods, Make make) {
    methods.ModifySendStatus(EndOf(Guarded(make)));
  }

  const grpc::ServerContextBase& context_;
  const std::string request_;
  ResetWatch& resets_;
  bool has_no_request_ = false;
};

class Factory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit Factory(ResetWatch& resets) : resets_(resets) {}

  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    grpc::experimental::Interceptor* interceptor = nullptr;  // Without memory for one: none.
    (void)GuardedRun([&] { interceptor = Make(*info); });
    return interceptor;
  }

 private:
  grpc::experimental::Interceptor* Make(grpc::experimental::ServerRpcInfo& info) {
    const google::protobuf::MethodDescriptor* const method = FindMethod(info.method());
    if (method != nullptr && !method->client_streaming()) {
      return new OfCall(*info.server_context(), method->input_type()->full_name(), resets_);
    }
    resets_.GivenUp(info.server_context()->peer());
    return nullptr;
  }

  ResetWatch& resets_;
};

// Of a method that there is not.
class Unknown final : public grpc::ServerGenericBidiReactor {
 public:
  explicit Unknown(const std::string& method) {
    // The name is whatever the client has sent, and as long as it likes; the answer repeats a part.
    Finish(EndOf(Guarded([&] {
      return absl::UnimplementedError(
          absl::StrCat("this service, of release ", BallastVersion(), ", has no method ",
                       method.substr(0, kMostNameBytes),
                       "; see ballast.proto, and whether the client is of a newer release"));
    })));
  }
  void OnDone() override { delete this; }

 private:
  static constexpr size_t kMostNameBytes = 128;
};

class OtherMethods final : public grpc::CallbackGenericService {
  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override {
    return MakeReactor<grpc::ServerGenericBidiReactor>(
        [&] { return new Unknown(context->method()); });
  }
};

}  // namespace

std::unique_ptr<grpc::CallbackGenericService> InterceptCalls(grpc::ServerBuilder& builder,
                                                             ResetWatch& resets) {
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> factories;
  factories.push_back(std::make_unique<Factory>(resets));
  builder.experimental().SetInterceptorCreators(std::move(factories));
  // gRPC's own answer to a method that there is not is UNIMPLEMENTED without a message.
  auto others = std::make_unique<OtherMethods>();
  builder.RegisterCallbackGenericService(others.get());
  return others;
}

}  // namespace ballast::server
