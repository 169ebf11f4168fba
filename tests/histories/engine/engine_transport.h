// A client's transport straight to an engine in the same process. What a stream says to its worker
// goes through the service's own outbox and codec; only the network is missing.
#ifndef BALLAST_TESTS_HISTORIES_ENGINE_ENGINE_TRANSPORT_H_
#define BALLAST_TESTS_HISTORIES_ENGINE_ENGINE_TRANSPORT_H_

#include <atomic>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "client/transport/transport.h"
#include "cpu_optimizer_service/engine.h"
#include "tests/histories/members/host.h"
#include "tests/histories/session/wires.h"

namespace ballast::histories {

// Of one rank. Thread-safe; host and wires outlive it.
class EngineTransport final : public client::Transport {
 public:
  EngineTransport(Host& host, Wires& wires, int rank) : host_(host), wires_(wires), rank_(rank) {}

  absl::StatusOr<v1::Job> CreateJob(const v1::CreateJobRequest& request,
                                    absl::Duration limit) override;
  absl::StatusOr<v1::Job> GetJob(const v1::GetJobRequest& request) override;
  absl::StatusOr<v1::AttachWorkerResponse> AttachWorker(const v1::AttachWorkerRequest& request,
                                                        absl::Duration limit) override;
  absl::StatusOr<v1::UndoStepResponse> UndoStep(const v1::UndoStepRequest& request) override;
  absl::StatusOr<v1::SaveJobResponse> SaveJob(const v1::SaveJobRequest& request) override;
  absl::StatusOr<v1::LoadJobResponse> LoadJob(const v1::LoadJobRequest& request) override;
  absl::StatusOr<v1::UploadWeightsResponse> UploadWeights(
      const v1::OpenTrain& open, absl::Duration limit, absl::Span<const int> chunks,
      const std::function<std::vector<std::byte>(int chunk)>& fill) override;
  absl::StatusOr<v1::ReadWeightsResponse> ReadWeights(
      const v1::ReadWeightsRequest& request, absl::Duration limit,
      const std::function<absl::Status(const v1::WeightHeader& header,
                                       client::PayloadPieces payload)>& place) override;
  std::unique_ptr<client::TrainCall> OpenTrainCall(client::TrainListener& listener) override;
  bool CanReconnect() override { return true; }  // There is always a next process.
  void CancelCalls() override { cancelled_ = true; }

 private:
  // `call(visit, job)`. UNAVAILABLE if the process dies before its end.
  template <typename Call>
  auto WithJob(const std::string& name, Call&& call)
      -> decltype(call(std::declval<Host::Visit&>(), std::declval<const std::shared_ptr<Job>&>()));

  Host& host_;
  Wires& wires_;
  const int rank_;
  std::atomic<bool> cancelled_ = false;
};

}  // namespace ballast::histories

#endif  // BALLAST_TESTS_HISTORIES_ENGINE_ENGINE_TRANSPORT_H_
