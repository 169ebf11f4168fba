// What malformed and impossible messages on the data path get.
#include <gmock/gmock.h>

#include <cmath>
#include <functional>
#include <string>

#include "cpu_optimizer_service/job/job.h"
#include "tests/server/jobs/malformed_input.h"

namespace ballast::server {
namespace {

// A valid stream of rank 0 in step 1, then one bad message.
class MalformedTrain : public MalformedInput {
 protected:
  void SetUp() override {
    CreateTinyJob(service_, "tiny");
    ASSERT_TRUE(worker_.Attach().ok());
  }

  grpc::Status StatusAfter(const std::function<void(v1::TrainRequest&)>& spoil) {
    worker_.OpenStream();
    worker_.Begin(1);
    v1::TrainRequest message;
    message.mutable_gradient()->mutable_header()->set_step(1);
    message.mutable_gradient()->mutable_header()->set_micro_step_end(1);
    message.mutable_gradient()->set_payload(std::string(512, '\0'));
    spoil(message);
    EXPECT_TRUE(worker_.Write(message));
    return worker_.ReadUntilEnd();
  }

  // An upload of nothing.
  grpc::Status Upload(const v1::OpenTrain& open) {
    grpc::ClientContext context;
    v1::UploadWeightsResponse response;
    const auto stream = service_.train().UploadWeights(&context, &response);
    v1::UploadWeightsRequest request;
    *request.mutable_open() = open;
    stream->Write(request);
    stream->WritesDone();
    return stream->Finish();
  }

  TestWorker worker_{service_, "tiny", 0, Codec::kGenerated};
};

void SetNonFinite(v1::TrainRequest& message, int parameter, int64_t element, float value) {
  message.mutable_end_micro_step()->set_step(1);
  message.mutable_end_micro_step()->set_all_used(true);
  v1::NonFiniteGradient& found = *message.mutable_end_micro_step()->mutable_non_finite();
  found.set_parameter(parameter);
  found.set_element(element);
  found.set_value(value);
}

TEST_F(MalformedTrain, GradientsThatDoNotFitAreRefused) {
  using Code = grpc::StatusCode;
  const struct {
    const char* what;
    Code code;
    std::function<void(v1::TrainRequest&)> spoil;
  } kCases[] = {
      {"one byte less", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) { m.mutable_gradient()->mutable_payload()->pop_back(); }},
      {"fp32 instead of bf16", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) { m.mutable_gradient()->mutable_payload()->resize(1024); }},
      {"no payload", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) { m.mutable_gradient()->clear_payload(); }},
      {"payload of an empty contribution", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) { m.mutable_gradient()->mutable_header()->set_empty(true); }},
      {"unknown chunk", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) { m.mutable_gradient()->mutable_header()->set_chunk(3); }},
      {"the largest chunk", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) { m.mutable_gradient()->mutable_header()->set_chunk(~0u); }},
      {"another rank's chunk", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) { m.mutable_gradient()->mutable_header()->set_chunk(1); }},
      {"a later step", Code::FAILED_PRECONDITION,
       [](v1::TrainRequest& m) { m.mutable_gradient()->mutable_header()->set_step(2); }},
      {"a micro-step left out", Code::FAILED_PRECONDITION,
       [](v1::TrainRequest& m) {
         m.mutable_gradient()->mutable_header()->set_micro_step_begin(1);
         m.mutable_gradient()->mutable_header()->set_micro_step_end(2);
       }},
      {"no micro-steps", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) { m.mutable_gradient()->mutable_header()->set_micro_step_end(0); }},
      {"begin of a later step", Code::FAILED_PRECONDITION,
       [](v1::TrainRequest& m) { m.mutable_begin_step()->set_step(5); }},
      {"a trainer_state too large", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) {
         m.mutable_begin_step()->set_step(1);
         m.mutable_begin_step()->set_trainer_state(std::string(kMaxTrainerStateBytes + 1, 's'));
       }},
      {"another trainer_state", Code::FAILED_PRECONDITION,
       [](v1::TrainRequest& m) {
         m.mutable_begin_step()->set_step(1);
         m.mutable_begin_step()->set_trainer_state("s");
       }},
      {"another divisor", Code::FAILED_PRECONDITION,
       [](v1::TrainRequest& m) { m.mutable_begin_step()->set_step(1); }},
      {"an unknown parameter", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) {
         m.mutable_end_micro_step()->set_step(1);
         m.mutable_end_micro_step()->add_used_parameters(1 << 30);
       }},
      {"a negative parameter", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) {
         m.mutable_end_micro_step()->set_step(1);
         m.mutable_end_micro_step()->add_used_parameters(-1);
       }},
      {"a non-finite element past the end", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) { SetNonFinite(m, 0, 300, NAN); }},
      {"a non-finite element before the beginning", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) { SetNonFinite(m, 0, -1, NAN); }},
      {"a non-finite element of no parameter", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) { SetNonFinite(m, 1 << 30, 0, NAN); }},
      {"a non-finite element that is finite", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) { SetNonFinite(m, 0, 0, 1.0f); }},
      {"a seal of no micro-steps", Code::INVALID_ARGUMENT,
       [](v1::TrainRequest& m) { m.mutable_seal()->set_step(1); }},
      {"open again", Code::INVALID_ARGUMENT, [](v1::TrainRequest& m) { m.mutable_open(); }},
      {"nothing", Code::INVALID_ARGUMENT, [](v1::TrainRequest& m) { m.Clear(); }},
  };
  const std::string hash = service_.StateHash("tiny");
  for (const auto& test : kCases) {
    ExpectRefused(StatusAfter(test.spoil), test.code, test.what);
  }
  EXPECT_EQ(service_.StateHash("tiny"), hash);
}

TEST_F(MalformedTrain, StreamsThatDoNotOpenRightAreRefused) {
  using Code = grpc::StatusCode;
  const struct {
    const char* what;
    Code code;
    std::function<void(v1::OpenTrain&)> spoil;
  } kCases[] = {
      {"no job", Code::NOT_FOUND, [](v1::OpenTrain& open) { open.set_name("jobs/x"); }},
      {"no name", Code::INVALID_ARGUMENT, [](v1::OpenTrain& open) { open.clear_name(); }},
      {"another uid", Code::NOT_FOUND, [](v1::OpenTrain& open) { open.set_uid("x"); }},
      {"no uid", Code::INVALID_ARGUMENT, [](v1::OpenTrain& open) { open.clear_uid(); }},
      {"rank 9", Code::INVALID_ARGUMENT, [](v1::OpenTrain& open) { open.set_rank(9); }},
      {"another process", Code::ABORTED, [](v1::OpenTrain& open) { open.set_process_id("x"); }},
      {"another generation", Code::ABORTED,
       [](v1::OpenTrain& open) { open.mutable_generation()->set_count(99); }},
  };
  for (const auto& test : kCases) {
    v1::OpenTrain open = worker_.OpenMessage();
    test.spoil(open);
    {
      grpc::ClientContext context;
      const auto stream = service_.train().Train(&context);
      v1::TrainRequest request;
      *request.mutable_open() = open;
      stream->Write(request);
      v1::TrainResponse response;
      EXPECT_FALSE(stream->Read(&response));
      ExpectRefused(stream->Finish(), test.code, std::string("Train, ") + test.what);
    }
    ExpectRefused(Upload(open), test.code, std::string("UploadWeights, ") + test.what);
  }
}

TEST_F(MalformedTrain, AnUnknownUpdateModeIsRefused) {
  v1::OpenTrain open = worker_.OpenMessage();
  open.set_update_mode(static_cast<v1::UpdateMode>(7));
  grpc::ClientContext context;
  const auto stream = service_.train().Train(&context);
  v1::TrainRequest request;
  *request.mutable_open() = open;
  stream->Write(request);
  stream->WritesDone();
  v1::TrainResponse response;
  EXPECT_FALSE(stream->Read(&response));
  ExpectRefused(stream->Finish(), grpc::StatusCode::INVALID_ARGUMENT, "update mode 7");
}

TEST_F(MalformedTrain, UploadsThatDoNotFitAreRefused) {
  grpc::ClientContext create_context;
  v1::CreateJobRequest create;
  *create.mutable_job() = TinyJob("empty");
  v1::Job job;
  ASSERT_TRUE(service_.jobs().CreateJob(&create_context, create, &job).ok());
  {
    v1::OpenTrain nobody;
    nobody.set_name(job.name());
    nobody.set_uid(job.uid());
    *nobody.mutable_generation() = job.generation();
    ExpectRefused(Upload(nobody), grpc::StatusCode::ABORTED, "no process, on a free rank");
  }
  TestWorker worker(service_, "empty", 0, Codec::kGenerated);
  ASSERT_TRUE(worker.Attach().ok());
  const auto upload = [&](uint64_t step, uint32_t chunk, size_t bytes, bool open_first) {
    grpc::ClientContext context;
    v1::UploadWeightsResponse response;
    const auto stream = service_.train().UploadWeights(&context, &response);
    v1::UploadWeightsRequest request;
    if (open_first) {
      *request.mutable_open() = worker.OpenMessage();
      stream->Write(request);
    }
    request.mutable_weights()->mutable_header()->set_step(step);
    request.mutable_weights()->mutable_header()->set_chunk(chunk);
    request.mutable_weights()->set_payload(std::string(bytes, '\0'));
    stream->Write(request);
    stream->WritesDone();
    return stream->Finish();
  };
  using Code = grpc::StatusCode;
  ExpectRefused(upload(0, 0, 1023, true), Code::INVALID_ARGUMENT, "a byte less");
  ExpectRefused(upload(0, 0, 512, true), Code::INVALID_ARGUMENT, "bf16 instead of fp32");
  ExpectRefused(upload(0, 1, 1024, true), Code::INVALID_ARGUMENT, "another rank's chunk");
  ExpectRefused(upload(0, 77, 1024, true), Code::INVALID_ARGUMENT, "an unknown chunk");
  ExpectRefused(upload(3, 0, 1024, true), Code::INVALID_ARGUMENT, "a step");
  ExpectRefused(upload(0, 0, 1024, false), Code::INVALID_ARGUMENT, "weights before open");
  v1::UploadWeightsResponse twice;
  const auto upload_twice = [&] {
    grpc::ClientContext context;
    const auto stream = service_.train().UploadWeights(&context, &twice);
    v1::UploadWeightsRequest request;
    *request.mutable_open() = worker.OpenMessage();
    stream->Write(request);
    request.mutable_weights()->set_payload(std::string(1024, '\0'));
    stream->Write(request);
    stream->Write(request);
    stream->WritesDone();
    return stream->Finish();
  };
  EXPECT_TRUE(upload_twice().ok());
  EXPECT_EQ(twice.chunks(), 1) << "a chunk that is sent twice has arrived once";
  const grpc::Status again = worker_.Upload();
  ExpectRefused(again, Code::FAILED_PRECONDITION, "weights for a job that has some");
}

// First weights with moments. What is cut or refused leaves a job that awaits them.
TEST_F(MalformedTrain, StatesThatDoNotFitAreRefused) {
  grpc::ClientContext create_context;
  v1::CreateJobRequest create;
  *create.mutable_job() = TinyJob("goes-on", /*world_size=*/1);
  v1::Job job;
  ASSERT_TRUE(service_.jobs().CreateJob(&create_context, create, &job).ok());
  TestWorker worker(service_, "goes-on", 0, Codec::kGenerated);
  ASSERT_TRUE(worker.Attach().ok());
  const auto upload = [&](const std::vector<int64_t>& counts, uint64_t state_step, uint64_t step,
                          const std::vector<std::string>& chunks, bool cut = false) {
    grpc::ClientContext context;
    v1::UploadWeightsResponse response;
    const auto stream = service_.train().UploadWeights(&context, &response);
    v1::UploadWeightsRequest request;
    *request.mutable_open() = worker.OpenMessage();
    v1::FirstState& state = *request.mutable_open()->mutable_first_state();
    state.set_step(state_step);
    state.mutable_update_counts()->Add(counts.begin(), counts.end());
    stream->Write(request);
    for (size_t chunk = 0; chunk < chunks.size(); ++chunk) {
      request.mutable_weights()->mutable_header()->set_step(step);
      request.mutable_weights()->mutable_header()->set_chunk(static_cast<uint32_t>(chunk));
      request.mutable_weights()->set_payload(chunks[chunk]);
      stream->Write(request);
    }
    if (cut) {
      context.TryCancel();
    } else {
      stream->WritesDone();
    }
    return stream->Finish();
  };
  const auto now = [&] {
    grpc::ClientContext context;
    v1::GetJobRequest request;
    request.set_name(job.name());
    v1::Job response;
    EXPECT_TRUE(service_.jobs().GetJob(&context, request, &response).ok());
    return response;
  };
  const std::vector<int64_t> counts = {4, 4, 2, 0};
  const std::string zeros(3 * 1024, '\0');
  const auto with = [&](size_t element, float value) {
    std::string chunk = zeros;
    std::memcpy(chunk.data() + element * sizeof(float), &value, sizeof(value));
    return chunk;
  };
  using Code = grpc::StatusCode;
  ExpectRefused(upload({4, 4, 2}, 4, 4, {}), Code::INVALID_ARGUMENT, "a count less");
  ExpectRefused(upload({4, 4, 5, 0}, 4, 4, {}), Code::INVALID_ARGUMENT, "more updates than steps");
  ExpectRefused(upload({4, 4, 2, 1}, 4, 4, {}), Code::INVALID_ARGUMENT, "updates of a frozen one");
  ExpectRefused(upload({}, 0, 0, {}), Code::INVALID_ARGUMENT, "a state of step 0");
  ExpectRefused(upload(std::vector<int64_t>(3 << 20, 1), 4, 4, {}), Code::INVALID_ARGUMENT,
                "three million counts");
  ExpectRefused(upload(counts, 4, 0, {zeros}), Code::INVALID_ARGUMENT, "weights of step 0");
  ExpectRefused(upload(counts, 4, 4, {zeros.substr(4)}), Code::INVALID_ARGUMENT, "a value less");
  ExpectRefused(upload(counts, 4, 4, {zeros.substr(0, 1024)}), Code::INVALID_ARGUMENT, "a plane");
  ExpectRefused(upload(counts, 4, 4, {with(256, NAN)}), Code::INVALID_ARGUMENT, "NaN in exp_avg");
  ExpectRefused(upload(counts, 4, 4, {with(512, -1)}), Code::INVALID_ARGUMENT, "a square below 0");
  EXPECT_TRUE(upload(counts, 4, 4, {zeros}).ok());
  upload(counts, 4, 4, {zeros, zeros}, /*cut=*/true);
  EXPECT_EQ(now().phase(), v1::AWAITING_WEIGHTS);
  ExpectRefused(worker.Upload(), Code::FAILED_PRECONDITION, "weights alone beside others");
  ExpectRefused(upload({4, 4, 3, 0}, 4, 4, {}), Code::FAILED_PRECONDITION, "other counts");
  ExpectRefused(upload(counts, 4, 4, {zeros, zeros, zeros, zeros}), Code::INVALID_ARGUMENT,
                "a chunk that the job has not");
  // All three came before that one.
  EXPECT_EQ(now().phase(), v1::READY);
  EXPECT_EQ(now().committed_step(), 4u);
  ExpectRefused(upload(counts, 4, 4, {zeros}), Code::FAILED_PRECONDITION, "once more");
}

TEST_F(MalformedTrain, ReadsOfWeightsThatAreNotThereAreRefused) {
  const auto read = [&](const std::function<void(v1::ReadWeightsRequest&)>& spoil) {
    grpc::ClientContext context;
    v1::ReadWeightsRequest request;
    request.set_name("jobs/tiny");
    request.set_uid(worker_.attachment().uid());
    spoil(request);
    const auto reader = service_.train().ReadWeights(&context, request);
    v1::ReadWeightsResponse response;
    EXPECT_FALSE(reader->Read(&response));
    return reader->Finish();
  };
  using Code = grpc::StatusCode;
  ExpectRefused(read([](auto& request) { request.set_uid("x"); }), Code::NOT_FOUND, "uid");
  ExpectRefused(read([](auto& request) { request.set_name("x"); }), Code::INVALID_ARGUMENT, "name");
  ExpectRefused(read([](auto& request) { request.set_step(1); }), Code::FAILED_PRECONDITION,
                "step");
  ExpectRefused(read([](auto& request) { request.add_chunks(3); }), Code::INVALID_ARGUMENT,
                "chunk");
}

TEST_F(MalformedTrain, AMessageBeyondTheLimitEndsItsStreamOnly) {
  worker_.OpenStream();
  v1::TrainRequest message;
  message.mutable_gradient()->set_payload(std::string(40 << 20, '\0'));
  worker_.Write(message);
  EXPECT_EQ(worker_.ReadUntilEnd().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  ExpectAnswers("a large message");
}

}  // namespace
}  // namespace ballast::server
