#include "server/interceptors.h"

#include <google/protobuf/descriptor.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/server_interceptor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/reason.h"
#include "server/call_guard.h"
#include "server/transport_settings.h"

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
      malformed_ = methods->GetRecvMessage() == nullptr;
      // Also a call that was reset before its message: it is answered before that is noticed.
      if (malformed_) (void)GuardedRun([this] { resets_.GivenUp(context_.peer()); });
    }
    if (malformed_ &&
        methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) {
      End(*methods, [this] {
        return WithReason(
            absl::InvalidArgumentError(absl::StrCat("the request is not a ", request_)),
            reason::kMalformedMessage);
      });
    } else if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS) &&
               methods->GetSendStatus().error_code() == grpc::StatusCode::UNIMPLEMENTED) {
      // So gRPC ends a call of which an exception has left the method.
      End(*methods, [] { return OutOfMemoryError(); });
    }
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_CLOSE) &&
        !malformed_ && context_.IsCancelled()) {
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
  bool malformed_ = false;
};

// Of a reflection stream, each of which has a thread of gRPC's. Without one it ends it, in its own
// words.
class OfReflection final : public grpc::experimental::Interceptor {
 public:
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS) &&
        methods->GetSendStatus().error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED) {
      methods->ModifySendStatus(EndOf(Guarded([] {
        return absl::ResourceExhaustedError(
            absl::StrCat("the service has ", kMaxReflectionThreads,
                         " reflection streams in progress; try again later"));
      })));
    }
    methods->Proceed();
  }
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
    const bool reflection = absl::StartsWith(info.method(), kReflection);
    return reflection ? new OfReflection() : nullptr;
  }

  static constexpr char kReflection[] = "/grpc.reflection.";
  ResetWatch& resets_;
};

}  // namespace

void InterceptCalls(grpc::ServerBuilder& builder, ResetWatch& resets) {
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> factories;
  factories.push_back(std::make_unique<Factory>(resets));
  builder.experimental().SetInterceptorCreators(std::move(factories));
}

}  // namespace ballast::server
